"""The functions that come with gspo, each in the real sandbox, and those that ask an HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.reward import RewardConfig
from gspo.common.errors import InputError
from gspo.reward.scoring.scorer import Scorer, open_scorer
from gspo_proto.rollout_pb2 import RewardUse, Rollout
from tests.support.reward_rollouts import make_rollout, reward_or_failure

pytestmark = pytest.mark.asyncio(loop_scope="function")

FUNCTIONS: list[dict[str, Any]] = [
    {"builtin": "exact_match"},
    {"builtin": "exact_match", "name": "tagged", "args": {"extract": r"<a>(.*?)</a>", "ignore_case": True}},
    {"builtin": "numeric", "args": {"tolerance": 0.01}},
    {"builtin": "math_equivalence"},
    {"builtin": "regex", "args": {"pattern": r"<think>.*</think>\s*\S+", "full": True}},
    {"builtin": "json_schema", "args": {"schema": {"type": "object", "required": ["a"]}}},
    {"builtin": "length_penalty", "args": {"max_tokens": 10, "buffer_tokens": 4, "penalty": 2.0}},
    {"builtin": "repetition_penalty", "args": {"ngram": 1}},
    {"builtin": "code_tests"},
    {"builtin": "code_tests", "name": "share", "args": {"partial": True}},
]
ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```"
HACK = """```python
import json, sys
class Any(int):
    def __eq__(self, other): return True
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, dict) and "runs" in value: value["runs"] = []
        frame = frame.f_back
    return Any(0)
json.dumps = lambda *args, **more: '3'
```"""
TESTS = [
    "assert add(1, 2) == 3",
    {"call": "add('a', 'b')", "expected": "ab"},
    {"call": "(add(1, 1),)", "expected": [2]},
]
CASES: list[tuple[str, str, dict[str, Any], Any]] = [
    ("exact_match", " 42\n", {"answer": "42"}, 1.0),
    ("exact_match", "42.0", {"answer": 42}, 0.0),
    ("exact_match", "42", {}, "needs the column 'ground_truth'"),
    ("tagged", "x <a>no</a> <a>Paris </a>", {"answer": "paris"}, 1.0),
    ("tagged", "Paris", {"answer": "paris"}, 0.0),
    ("numeric", "so 12 * 100 = 1,200.005", {"answer": "1200"}, 1.0),
    ("numeric", "1200.02 or -1.2e3", {"answer": "1200"}, 0.0),
    ("numeric", "none", {"answer": "1"}, 0.0),
    ("numeric", "1", {"answer": "one"}, "ValueError"),
    ("math_equivalence", r"Therefore \boxed{\frac{1}{2}}.", {"answer": "0.5"}, 1.0),
    ("math_equivalence", "The answer is $x = 3$", {"answer": "3"}, 1.0),
    ("math_equivalence", r"\boxed{\{1, 2\}}", {"answer": r"\{2, 1\}"}, 1.0),
    ("math_equivalence", r"\boxed{3}", {"answer": "4"}, 0.0),
    ("math_equivalence", "I do not know", {"answer": "4"}, 0.0),
    ("regex", "<think>a\nb</think> 4", {}, 1.0),
    ("regex", "4 <think>a</think>", {}, 0.0),
    ("json_schema", '```json\n{"a": 1}\n```', {}, 1.0),
    ("json_schema", '{"b": 1}', {}, 0.0),
    ("json_schema", "{", {}, 0.0),
    ("repetition_penalty", "a b c d", {}, 0.0),
    ("repetition_penalty", "a A a a", {}, -0.75),
    ("code_tests", ADD, {"tests": TESTS[:2]}, 1.0),
    ("code_tests", ADD, {"tests": TESTS}, 0.0),  # a tuple is not a list
    ("share", ADD, {"tests": TESTS}, pytest.approx(2 / 3)),
    ("share", ADD, {"tests": [{"stdin": "", "expected": ""}, *TESTS[:1]]}, 1.0),
    ("code_tests", "print(sum(map(int, input().split())))", {"tests": [{"stdin": "1 2", "expected": "3\n"}]}, 1.0),
    ("code_tests", HACK, {"tests": TESTS[:1]}, 0.0),
    ("code_tests", "def add(a, b):\n    while True: pass", {"tests": TESTS[:1]}, 0.0),
    ("code_tests", "import os; os._exit(0)", {"tests": TESTS[:1]}, 0.0),
    ("code_tests", "def add(", {"tests": TESTS[:1]}, 0.0),
    ("code_tests", ADD, {"tests": ["assert add(1, 2) > 3"]}, "only `assert CALL == LITERAL` can be read"),
    ("code_tests", ADD, {}, "there are no tests"),
]


def config_of(functions: list[dict[str, Any]], **more: Any) -> RewardConfig:
    return RewardConfig.model_validate({"functions": functions, "timeout_s": 5.0, **more})


def asking(name: str, text: str, columns: dict[str, Any]) -> Rollout:
    rollout = make_rollout(text, **columns)
    rollout.rewards.append(RewardUse(name=name, weight=1.0))
    return rollout


async def test_each_built_in_gives_its_documented_value() -> None:
    async with open_scorer(config_of(FUNCTIONS, timeout_s=3.0), name="reward-0") as scorer:
        for name, text, columns, expected in CASES:
            (score,) = await scorer.score([asking(name, text, columns)])
            outcome = reward_or_failure(score)
            if isinstance(expected, str):
                assert isinstance(outcome, str) and expected in outcome, (name, text, outcome)
            else:
                assert outcome == expected, (name, text, outcome)
        lengths = [asking("length_penalty", "", {}) for _ in range(4)]
        for rollout, count in zip(lengths, (5, 6, 8, 20), strict=True):
            rollout.token_ids[:] = range(count)
        assert [reward_or_failure(score) for score in await scorer.score(lengths)] == [0.0, 0.0, -1.0, -2.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            {"builtin": "regex", "args": {"patern": "a"}},
            r"functions.0.args.patern: .* has no such parameter.*'pattern'",
        ),
        ({"builtin": "llm_judge", "args": {"url": "http://x/v1"}}, "functions.0.args.model: Field required"),
        ({"builtin": "llm_judge", "args": {"url": "x", "model": "m"}}, "functions.0.args.url"),
        ({"builtin": "reward_model", "args": {"modell": "m"}}, "functions.0.args.model"),
    ],
)
async def test_wrong_arguments_are_refused(function: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        async with open_scorer(config_of([function]), name="check"):
            pass


@asynccontextmanager
async def http_server(replies: list[tuple[int, Any]]) -> AsyncIterator[tuple[str, list[Any]]]:
    """Answers with one reply after the other, the last one again and again; its requests."""
    asked: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.split("content-length: ")[1].split("\r\n")[0])
        asked.append(json.loads(await reader.readexactly(size)))
        status, body = replies[min(len(asked), len(replies)) - 1]
        if status == 0:
            await asyncio.sleep(30)
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


async def score_by(scorer: Scorer, *texts: str) -> list[Any]:
    return [
        reward_or_failure(score) for score in await scorer.score([make_rollout(text, answer="4") for text in texts])
    ]


async def test_a_server_of_the_users_own_is_asked_again_until_it_answers() -> None:
    good = {"rewards": [1, 0.5], "extra_logs": {"length": [3, 4], "tries": 2}}
    async with http_server([(503, "busy"), (500, "oh"), (200, good)]) as (url, asked):
        config = config_of([{"url": f"{url}/score", "args": {"task": "add"}, "weight": 2.0}])
        async with open_scorer(config, name="reward-0") as scorer:
            scores = await scorer.score([make_rollout(text, answer="4") for text in ("4", "5")])
    assert [reward_or_failure(score) for score in scores] == [2.0, 1.0]
    assert [(part.name.partition("/")[2], part.value, part.weight) for part in scores[0].parts] == [
        ("", 1.0, 2.0),
        ("length", 3.0, 0.0),
        ("tries", 2.0, 0.0),
    ]
    assert len(asked) == 3
    assert asked[-1] == {"task": "add", "query": ["2+2=4", "2+2=5"], "prompts": ["2+2="] * 2, "labels": ["4", "4"]}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((0, ""), "gave no answer within 1 s"),
        ((200, {"rewards": [1, 2]}), 'returned 2 values as "rewards" for 1 answers'),
        ((200, {"score": 1}), 'returned NoneType as "rewards"'),
        ((200, "<html>"), "answered with something else than JSON"),
        ((404, "nothing here"), "answered HTTP 404: nothing here"),
        ((200, {"rewards": ["1"]}), "returned str where a number belongs"),
        ((200, '{"rewards": [NaN]}'), "returned NaN"),
        ((200, '{"rewards": [1' + "0" * 400 + "]}"), "returned 1.79769e+308, and rewards are from"),
        ((200, {"rewards": [1], "extra_logs": {"tries": "2"}}), 'returned str as extra_logs["tries"] for 1 answers'),
        ((200, {"rewards": [1], "extra_logs": {"tries": [1, 2]}}), 'returned 2 values as extra_logs["tries"]'),
        ((200, "[" * 100_000), "answered with something else than JSON"),
        ((200, '{"rewards": [1], "extra_logs": {"\\ud800\\n": [1]}}'), "returned a part named '?\\n'"),
    ],
)
async def test_a_server_that_answers_otherwise_is_a_failure(reply: tuple[int, Any], message: str) -> None:
    async with (
        http_server([reply]) as (url, _),
        open_scorer(config_of([{"url": url}], timeout_s=1.0), name="reward-0") as scorer,
    ):
        (outcome,) = await score_by(scorer, "4")
    assert isinstance(outcome, str) and message in outcome


async def test_a_judge_names_a_number_or_fails_that_answer_alone() -> None:
    def completion(text: str) -> tuple[int, Any]:
        return 200, {"choices": [{"message": {"content": text}}]}

    args = {"model": "judge", "prompt": "{prompt}|{answer}|{ground_truth}", "concurrency": 1}
    async with http_server([completion("7 of 10: fine.\n8"), completion("no idea")]) as (url, asked):
        config = config_of([{"builtin": "llm_judge", "args": {**args, "url": f"{url}/v1"}}])
        async with open_scorer(config, name="reward-0") as scorer:
            first, second = await score_by(scorer, "{ground_truth}", "5")
    assert first == 0.8
    assert isinstance(second, str) and "the judge named no number: no idea" in second
    assert asked[0]["messages"] == [{"role": "user", "content": "2+2=|{ground_truth}|4"}]
    assert (asked[0]["model"], asked[0]["temperature"]) == ("judge", 0)


async def test_a_reward_model_scores_as_transformers_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.support.tiny_model import make_tiny_classifier

    model, tokenizer = make_tiny_classifier(tmp_path)
    async with open_scorer(
        config_of([{"builtin": "reward_model", "args": {"model": str(tmp_path)}}], timeout_s=60.0), name="reward-0"
    ) as scorer:
        outcome = await score_by(scorer, "4", "55")
    for text, score in zip(("4", "55"), outcome, strict=True):
        messages = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": text}]
        tokens = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), return_tensors="pt")
        with torch.inference_mode():
            assert score == pytest.approx(model(**tokens).logits[0, 0].item(), abs=1e-5)
