"""Data files whose values once changed on their way: what a reward function gets in a run is what the file says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gspo.common.config.schema import Config
from gspo.coordinator.data.prompts import PromptSet, training_prompts
from gspo.reward.check import check
from gspo.reward.functions.configured import open_library
from gspo.reward.sandbox.values import Failure
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tokenizer

# 1 where the answer is what the file holds: the prompt has it too.
SAME = """
def reward(prompts, completions, answer, **columns):
    texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    return [float(text.split()[-1] == str(a)) for text, a in zip(texts, answer)]
"""


def rows_of(folder: Path, form: str, answers: list[Any]) -> str:
    rows = [{"prompt": [{"role": "user", "content": f"code {answer}"}], "answer": answer} for answer in answers]
    if form == "csv":
        (folder / "p.csv").write_text("prompt,answer\n" + "".join(f"code {answer},{answer}\n" for answer in answers))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet")
    else:
        (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"p.{form}"


def read(folder: Path, data: dict[str, Any], function: dict[str, Any]) -> tuple[Config, list[Prompt]]:
    config = make_run(folder, folder / "model", data=data, reward={"functions": [function]})
    (prompts,) = training_prompts(config, make_tokenizer())
    return config, prompts.prompts(range(len(prompts)))


async def scored(config: Config, prompts: list[Prompt], text: str) -> list[float | str]:
    rollouts = [Rollout(prompt=prompt, text=text, token_ids=[0], outcome=OUTCOME_EOS) for prompt in prompts]
    async with open_library(config.reward, sources=config.sources) as library:
        function = await library.find(config.reward.functions[0].label, "")
        values, _ = await function.score(rollouts, session="")
    assert all(values)
    return [value.reason if isinstance(value, Failure) else value.reward for value in values if value]


@pytest.mark.parametrize(
    ("form", "answers"),
    [
        ("csv", ["007", "010", "00", "1.50", "NA", "True", "2024-01-05"]),
        ("jsonl", [f"2024-01-{day:02}" for day in range(1, 21)]),
        ("jsonl", ["12:30:00", "42", 42, 0.5, 123456789012345678901234567890, 9007199254740993]),
        ("parquet", [9007199254740993, 42]),
        ("parquet", ["2024-01-05", "007"]),
    ],
)
async def test_the_check_and_the_run_see_the_values_of_the_file(
    tmp_path: Path, form: str, answers: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.py").write_text(SAME)
    config, prompts = read(tmp_path, {"prompts": rows_of(tmp_path, form, answers)}, {"path": "r.py"})
    assert await scored(config, prompts, "x") == [1.0] * len(answers)
    (tmp_path / "r.py").write_text(
        SAME.replace("float(text", "len(undefined) if text.split()[-1] != str(a) else float(text")
    )
    check_in_thread(config)
    assert "NameError" not in capfd.readouterr().err


def check_in_thread(config: Config) -> None:
    """The check has an event loop of its own."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(check, config).result(timeout=120)


async def test_the_schemas_of_a_table_are_valid(tmp_path: Path) -> None:
    schemas = [
        {"type": "object", "properties": {name: {"type": kind}}, "required": [name]}
        for name, kind in (("a", "integer"), ("b", "string"))
    ]
    pq.write_table(pa.Table.from_pylist([{"prompt": "x", "json_schema": s} for s in schemas]), tmp_path / "p.parquet")
    config, prompts = read(tmp_path, {"prompts": "p.parquet"}, {"builtin": "json_schema"})
    assert await scored(config, prompts, '{"a": 1}') == [1.0, 0.0]
    assert await scored(config, prompts, '{"b": "x"}') == [0.0, 1.0]


async def test_a_key_names_the_right_answers(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "solution": "4", "answer": "no"}, {"prompt": "y", "solution": "5", "answer": "no"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"prompts": ["p.jsonl"], "answer_column": "solution"}
    config, prompts = read(tmp_path, data, {"builtin": "exact_match"})
    assert await scored(config, prompts, "4") == [1.0, 0.0]
    assert json.loads(prompts[0].columns_json) == {"solution": "4", "answer": "no", "ground_truth": "4"}


def test_the_tool_calls_of_a_table_are_those_that_were_written(
    tmp_path: Path, open_chat: Callable[..., PromptSet]
) -> None:
    def conversation(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [{"role": "user", "content": "hi"}, asked, {"role": "tool", "content": "5"}]

    rows = [{"prompt": conversation("weather", {"city": "Rome"})}, {"prompt": conversation("add", {"x": 1})}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    texts = [prompt.text for prompt in open_chat(tmp_path / "p.parquet").prompts(range(2))]
    assert ['weather{"city": "Rome"}' in texts[0], 'add{"x": 1}' in texts[1]] == [True, True]


@pytest.fixture
def open_chat() -> Callable[..., PromptSet]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + (c.function.arguments | tojson) }}{% endfor %}\n{% endfor %}"
    )

    def opened(path: Path) -> PromptSet:
        (prompts,) = training_prompts(
            make_run(path.parent, path.parent / "model", data={"prompts": str(path)}), tokenizer
        )
        return prompts

    return opened
