"""`--check` reports the problem of a reward function before anything starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gspo.common.config.loading import CONFIG_NAME
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.reward.check import check
from gspo.reward.sandbox import execution
from tests.support.service_process import make_run

GOOD = (
    "def reward(prompts, completions, **columns):\n"
    "    return [float(a == c) for a, c in zip(columns['answer'], completions)]"
)


def run_with(folder: Path, source: str, **sections: Any) -> Config:
    file = folder / "r.py"
    file.write_text(source)
    return make_run(folder, folder / "model", reward={"functions": [{"path": str(file)}], "timeout_s": 2.0}, **sections)


def rows(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in records))
    return path


def test_a_good_function_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(run_with(tmp_path, GOOD))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "def reward(completions):\n  return [1.0\n",
            r"reward.functions.0.path: .*r.py, line 2, column 10: '\[' was never",
        ),
        ("def score(x): ...", "reward.functions.0: .*holds no reward function; it defines score"),
        ("def reward(completions, anwser): ...", r"data.prompts: has no column 'anwser'.*Did you mean 'answer'"),
        ("def reward(completions): return [1.0]", "returned 1 values for 2 completions. Return a list with one number"),
        ("def reward(completions): return 1.0", "returned float where a list of numbers belongs"),
        ("def reward(completions): pass", "returned None where a list of numbers belongs"),
        ("def reward(completions): return ['1'] * 2", "returned str where a number belongs"),
        ("def reward(completions): return [{'a': '1'}] * 2", "returned str where a number belongs"),
        (
            "def reward(completions): return [float('nan')] * 2",
            r"2 made-up answers \('42'\), returned NaN for each. Return",
        ),
        ("def reward(completions): return [{'a': 1e400}] * 2", "part 'a': returned infinity for each"),
        ("def reward(completions): return scores", "raised NameError: name 'scores' is not defined"),
        ("def reward(completions): import no_such_module", "raised ModuleNotFoundError"),
        ("import os\ndef reward(completions): os.fork()", "a function is one process: .*`url` for a server of yours"),
        ("def compute_score(solution_str, ground_truth): return truth", "raised NameError"),
        ("def compute_score(solution_str, ground_truth): return 'a'", "returned str where a number belongs"),
    ],
)
def test_a_function_that_cannot_work_is_an_input_error(tmp_path: Path, source: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        check(run_with(tmp_path, source))


def test_a_file_that_hangs_at_its_import_is_ended_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "LOAD_TIMEOUT_S", 0.5)
    why = "cannot be loaded: took longer than 0.5 s and was killed. Do less at the top of the file"
    with pytest.raises(InputError, match=why):
        check(run_with(tmp_path, f"import time\ntime.sleep(60)\n{GOOD}"))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def reward(completions): raise ValueError('no boxed answer')", "raised ValueError: no boxed answer"),
        ("def reward(completions): return [1.0, float('nan')]", "returned NaN"),
        ("import time\ndef reward(completions): time.sleep(60)", "took longer than 2 s"),
        ("def compute_score(solution_str, ground_truth): raise KeyError('x')", "raised KeyError: 'x'"),
    ],
)
def test_a_failure_that_a_made_up_answer_may_cause_is_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], source: str, why: str
) -> None:
    check(run_with(tmp_path, source))
    assert f"tried on a made-up answer, {why}" in capfd.readouterr().err


def test_an_evaluation_without_right_answers_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    held_out = rows(tmp_path / "e.jsonl", {"prompt": "1+2="})
    why = "^evaluation.prompts: reward of .*r.py scores .*, and none .*: it raised KeyError: 'answer'.* right answers"
    with pytest.raises(InputError, match=why):
        check(run_with(tmp_path, GOOD, evaluation={"prompts": str(held_out)}))
    rows(held_out, {"prompt": "1+2=", "answer": "3"})
    check(run_with(tmp_path, GOOD, evaluation={"prompts": str(held_out)}))
    assert capfd.readouterr().err == ""


def test_verl_needs_a_right_answer(tmp_path: Path) -> None:
    data = rows(tmp_path / "d.jsonl", {"prompt": "2+2=", "truth": "4"})
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0"
    with pytest.raises(
        InputError, match=r"data.prompts: has no right answer.*reward_model.ground_truth.*Known are: truth"
    ):
        check(run_with(tmp_path, source, data={"prompts": str(data)}))
    rows(data, {"prompt": "2+2=", "reward_model": {"ground_truth": "4"}})
    check(run_with(tmp_path, source, data={"prompts": str(data)}))


def test_held_out_prompts_need_the_columns_too(tmp_path: Path) -> None:
    held_out = rows(tmp_path / "e.jsonl", {"prompt": "2+2=", "solution": "4"})
    source = "def reward(completions, answer): return [1.0] * len(completions)"
    with pytest.raises(InputError, match=r"evaluation.prompts: has no column 'answer'"):
        check(run_with(tmp_path, source, evaluation={"prompts": str(held_out)}))


def test_a_column_that_the_first_row_leaves_out_is_there(tmp_path: Path) -> None:
    data = rows(tmp_path / "d.jsonl", {"prompt": "2+2="}, {"prompt": "3+3="}, {"prompt": "4+4=", "hint": "8"})
    source = "def reward(completions, hint): return [len(undefined) if h is not None else 1.0 for h in hint]"
    check(run_with(tmp_path, source, data={"prompts": str(data)}))


def test_messages_reach_the_function_as_messages(tmp_path: Path) -> None:
    data = rows(tmp_path / "d.jsonl", {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4"})
    source = (
        "def reward(prompts, completions):\n"
        "    return [len(undefined) if c[0]['role'] != 'assistant' or p[0]['content'] != '2+2=' else 1.0\n"
        "            for p, c in zip(prompts, completions)]"
    )
    check(run_with(tmp_path, source, data={"prompts": str(data)}))


@pytest.mark.parametrize("form", ["parquet", "csv", "json", "folder", "saved"])
def test_data_of_every_form_is_read(tmp_path: Path, form: str) -> None:
    table = pa.table({"prompt": ["2+2=", "3+3="], "answer": ["4", "6"]})
    path = tmp_path / f"d.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    elif form == "csv":
        path.write_text("prompt,answer\n2+2=,4\n3+3=,6\n")
    elif form == "json":
        path.write_text(json.dumps(table.to_pylist()))
    elif form == "saved":
        datasets.DatasetDict({"train": datasets.Dataset(table)}).save_to_disk(str(path))
    else:
        path = tmp_path / "d"
        path.mkdir()
        pq.write_table(table, path / "train.parquet")
    source = "def reward(completions, answer): return [len(undefined) if not a else 1.0 for a in answer]"
    check(run_with(tmp_path, source, data={"prompts": str(path)}))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("none.jsonl", None, "none.jsonl does not exist"),
        ("d.txt", "2+2=", "is none of .jsonl, .json, .csv, .parquet"),
        ("d.jsonl", "", "has no rows"),
        ("d.jsonl", "{broken\n", "line 1, character 2: is not JSON"),
        ("d.jsonl", '{"question": "2+2="}\n', "has no column 'prompt'"),
    ],
)
def test_data_that_cannot_be_read_is_an_input_error(tmp_path: Path, name: str, text: str | None, why: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=why):
        check(run_with(tmp_path, GOOD, data={"prompts": str(path)}))


def test_the_command_line_exits_with_two(tmp_path: Path) -> None:
    config = run_with(tmp_path, "def score(x): ...")
    command = [sys.executable, "-m", "gspo.reward", "--check", str(config.run_dir / CONFIG_NAME)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: reward.functions.0: ")
    assert done.stderr.count("\n") == 1


def test_likely_mistakes_are_named_by_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    gaps = [{"prompt": "3+1=", "answer": "5"}, {"prompt": "50+1="}]
    data = rows(tmp_path / "d.jsonl", *good, *gaps)
    source = "def compute_score(solution_str, ground_truth): return 1.0"
    check(run_with(tmp_path, source, data={"prompts": str(data), "types": {"answr": "number"}}))
    unused, gap, conflict, unanswered = capfd.readouterr().err.splitlines()
    rule = "data.types.answr: has no effect, for no row of data.prompts has a column 'answr'"
    assert unused == f"warning: {rule}. Did you mean 'answer'?"
    assert gap == "warning: data.prompts: column 'answer' has no value in d.jsonl, line 42"
    assert conflict == "warning: data.prompts: one prompt has two right answers in d.jsonl, line 41 and 4"
    assert re.search(r"there is no right answer for compute_score of .*r\.py in d\.jsonl, line 42 \(column", unanswered)


def test_right_answers_that_are_empty_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = rows(tmp_path / "d.jsonl", *({"prompt": f"{n}+1=", "answer": " " if n > 1 else "1"} for n in range(4)))
    check(run_with(tmp_path, GOOD, data={"prompts": str(data)}))
    warning = "warning: data.prompts: the right answer is empty text in 2 rows, the first d.jsonl, line 3"
    assert warning in capfd.readouterr().err.splitlines()


def test_a_column_of_images_is_said_once_and_refused_where_a_function_takes_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    image = {"bytes": b"\x89PNG" * 99, "path": "a.png"}
    table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "image": [image, image]})
    pq.write_table(table, tmp_path / "d.parquet")
    data: dict[str, Any] = {"prompts": str(tmp_path / "d.parquet")}
    check(run_with(tmp_path, GOOD, data=data))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: data.prompts: column 'image' has images, which the policy does not see")
    takes = "def reward(completions, image): return [float(len(one['bytes']) > 9) for one in image]"
    with pytest.raises(InputError, match=r"column 'image', which reward of .*r.py asks for.*data.types.image: base64"):
        check(run_with(tmp_path, takes, data=data))
    check(run_with(tmp_path, takes, data={**data, "types": {"image": "base64"}}))


def test_a_column_that_is_read_in_silence_and_missing_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = (
        "def reward(prompts, completions, truncated=None, level=None, **columns):\n"
        "  wanted = columns.get('solution', [''] * 2)\n"
        "  return [float(bool(a) and a in c) for c, a in zip(completions, wanted)]\n"
    )
    data = rows(tmp_path / "d.jsonl", {"prompt": "3+1=", "answer": "4"}, {"prompt": "1+1=", "answer": "2"})
    check(run_with(tmp_path, source, data={"prompts": str(data)}))
    level, solution = capfd.readouterr().err.splitlines()
    assert level.endswith(" reads 'level', and every row lacks this column: the data set has answer")
    assert re.search(r"warning: data\.prompts: reward of .*r\.py reads 'solution', and every row lacks", solution)
