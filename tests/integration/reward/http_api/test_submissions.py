"""The REST API from a user's side: submissions, refusals, trials, activation, retirement, access."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gspo.reward.registry.records import Content, RequestedLimits, Submission
from gspo.reward.registry.store import Registry
from gspo_proto.rollout_pb2 import RewardUse
from tests.integration.reward.http_api.rest_client import NEWER, SOURCE, open_rest_client
from tests.support.reward_rollouts import make_rollout, reward_or_failure

pytestmark = pytest.mark.asyncio(loop_scope="function")

CASE = {"input": {"prompt": "2+2=", "completion": "4", "answer": "4"}, "expected": 1.0}
ENVIRONMENT = """
def reset(task):
    return {"left": task["tries"], "number": task["number"]}, "Guess."

def step(state, action):
    state["left"] -= 1
    right = action == str(state["number"])
    if action == "break":
        raise ValueError("broken")
    return state, "Right." if right else "No.", float(right), right or state["left"] == 0
"""


async def test_a_function_is_submitted_tried_replaced_and_retired(redis: Redis, tmp_path: Path) -> None:
    async with open_rest_client(tmp_path, redis) as (client, scorer, _):
        first = await client.post("", json={"name": "exact", "source": SOURCE, "tests": [CASE]})
        view = first.json()
        assert (first.status_code, view["active"], view["new"], view["tests"]) == (201, True, True, 1)
        assert view["version"] == hashlib.sha256(SOURCE.encode()).hexdigest()
        again = await client.post("", files={"file": ("exact.py", SOURCE)}, data={"name": "exact"})
        assert (again.status_code, again.json()["version"], again.json()["new"]) == (201, view["version"], False)
        old, new = view["version"], (await client.post("", json={"name": "exact", "source": NEWER})).json()["version"]

        rollout = make_rollout("4", answer="4")
        rollout.rewards.append(RewardUse(name="exact", weight=1.0))
        pinned = make_rollout("4", answer="4")
        pinned.rewards.append(RewardUse(name="exact", version=old[:12], weight=1.0))

        async def scored() -> list[tuple[Any, str]]:
            return [(reward_or_failure(score), score.version) for score in await scorer.score([rollout, pinned])]

        assert await scored() == [(1.0, old), (1.0, old)]
        moved = (await client.post("/exact/activate", json={"version": new[:8]})).json()
        assert (moved["active"], moved["was"]) == (new, old)
        assert await scored() == [(2.0, new), (1.0, old)]
        stale = await client.post("/exact/activate", json={"version": new, "if_active": old})
        assert (stale.status_code, "Look and try again" in stale.json()["detail"]) == (409, True)
        assert (await client.post("/exact/activate", json={"version": old})).json()["was"] == new
        assert await scored() == [(1.0, old), (1.0, old)]

        assert (await client.delete("/exact")).json()["active"] is None
        (refused, _), kept = await scored()
        assert str(refused).startswith("exact: exact was retired, and no version of it is asked for")
        assert kept == (1.0, old)
        shown = (await client.get("/exact")).json()
        assert (shown["retired"], shown["active"], shown["versions"]) == (True, None, 2)
        await _look_back(client, old, new)


async def _look_back(client: Any, old: str, new: str) -> None:
    versions = (await client.get("/exact/versions")).json()["versions"]
    assert [(version["version"], version["submitted_by"]) for version in versions] == [
        (old, "anonymous"),
        (new, "anonymous"),
    ]
    assert (await client.get("/exact/source", params={"version": new})).json()["source"] == NEWER
    assert (await client.get(f"/exact/versions/{new[:10]}")).json()["version"] == new
    usage = {used["version"]: used for used in (await client.get("/exact/usage")).json()["usage"]}
    assert (usage[old]["calls"], usage[new]["calls"], usage[old]["errors"]) == (6, 1, {})
    assert 0 < usage[old]["latency_s"]["p50"] <= usage[old]["latency_s"]["longest"]
    lines = (await client.get("/exact/log")).json()["lines"]
    assert [line["action"] for line in lines] == ["retire", "activate", "activate", "submit", "submit", "submit"]
    assert {line["who"] for line in lines} == {"anonymous"}
    listed = {reward["name"]: reward["origin"] for reward in (await client.get("")).json()["rewards"]}
    assert listed == {"r": "configured", "exact": "registered"}


async def test_modules_are_submitted_with_the_source(redis: Redis, tmp_path: Path) -> None:
    source = "from helpers import same\ndef reward(completions, answer): return [*map(same, completions, answer)]\n"
    modules = {"helpers.py": "def same(text, answer):\n    return float(float(text) == float(answer))\n"}
    body = {"name": "exact", "source": source, "modules": modules, "tests": [CASE]}
    async with open_rest_client(tmp_path, redis) as (client, _, _):
        accepted = await client.post("", json=body)
        assert accepted.status_code == 201, accepted.text
        version = accepted.json()["version"]
        as_form = {"name": "exact", "modules": json.dumps(modules)}
        again = await client.post("", data=as_form, files={"file": ("r.py", source)})
        assert (again.json()["version"], again.json()["new"]) == (version, False)
        other = await client.post("", json=body | {"modules": {"helpers.py": modules["helpers.py"] + "#"}})
        assert other.json()["version"] not in (version, hashlib.sha256(source.encode()).hexdigest())
        assert (await client.get("/exact/source", params={"version": version})).json()["modules"] == modules
        rows = [{"completion": "four", "answer": "4"}]
        (tried,) = (await client.post("/exact/try", json={"rows": rows})).json()["results"]
        # Only Redis and the copy on disk have it: another replica reads the same.
        assert (await Registry(redis, tmp_path / "copy", replica="other").resolve("exact", version)).modules == modules
        for wrong, field in (
            ({"../up.py": ""}, "modules"),
            ({f"m{number}.py": "" for number in range(33)}, "modules"),
            ({"helpers.py": "import requests"}, "modules.helpers.py"),
            ({"helpers.py": "x = ("}, "modules.helpers.py"),
        ):
            refused = await client.post("", json=body | {"modules": wrong})
            assert refused.status_code == 422
            assert refused.json()["problems"][0]["field"].startswith(field)
    assert tried["failure"]["text"].startswith("raised ValueError: could not convert string to float: 'four'")
    assert "return float(float(text) == float(answer))" in tried["failure"]["traceback"]


async def test_a_bom_changes_nothing(redis: Redis, tmp_path: Path) -> None:
    bom, json_type = "\ufeff".encode(), {"content-type": "application/json"}
    async with open_rest_client(tmp_path, redis) as (client, _, _):
        in_source = await client.post("", json={"name": "exact", "source": "\ufeff" + SOURCE})
        before_json = await client.post(
            "", content=bom + json.dumps({"name": "exact", "source": SOURCE}).encode(), headers=json_type
        )
        as_file = await client.post("", data={"name": "exact"}, files={"file": ("r.py", bom + SOURCE.encode())})
    replies = [in_source, before_json, as_file]
    assert [reply.status_code for reply in replies] == [201] * 3, in_source.text
    assert {reply.json()["version"] for reply in replies} == {hashlib.sha256(SOURCE.encode()).hexdigest()}


# Changes of a good submission, each with status, rule, line and column, and message.
REFUSED: list[tuple[dict[str, Any], int, str | None, Any, str]] = [
    ({"source": "x = 1\ndef reward(completions:\n"}, 422, "syntax", (2, 11), "'(' was never closed"),
    ({"source": "import os\nimport requests\n" + SOURCE}, 422, "import", (2, 1), "imports 'requests'"),
    ({"source": SOURCE + "  import torch.nn\n"}, 422, "syntax", (3, None), "unindent"),
    ({"source": SOURCE + "def f():\n  import torch.nn\n"}, 422, "import", (4, 3), "imports 'torch'"),
    ({"source": "def score(a): ...\n"}, 422, "signature", (1, 1), "holds no reward function"),
    ({"source": SOURCE + "1 / 0\n"}, 422, "load", (3, 1), "ZeroDivisionError"),
    ({"source": SOURCE, "entry": "other"}, 422, "signature", (1, 1), "has no function 'other'"),
    ({"tests": [{**CASE, "expected": 0.5}]}, 422, "test", (None, None), "tests.0: gave 1, and 0.5 is expected"),
    ({"tests": [{"input": {"completion": "4"}, "expected": 1}]}, 422, "test", (None, None), "needs the column"),
    (
        {"tests": [{"input": {"completions": "4"}, "expected": 0}]},
        422,
        "field",
        (None, None),
        "is missing or not text",
    ),
    ({"source": "x = bytearray(2**33)\n" + SOURCE}, 422, "load", (1, 1), "Raise limits.memory_mb"),
    ({"tests": [{"input": {"a": float("nan")}, "expected": 1}]}, 422, "field", (None, None), "JSON"),
    ({"limits": {"timeout_s": 0}}, 422, "field", (None, None), "limits.timeout_s"),
    ({"limits": {"timeout": 1}}, 422, "field", (None, None), "limits.timeout: this call has no such field"),
    ({"name": "../etc"}, 422, "field", (None, None), "name"),
    ({"kind": "environment"}, 422, "signature", (None, None), "reset"),
    ({"name": "r"}, 409, None, None, "the run's configuration has a function 'r'"),
]


async def test_a_refusal_names_rule_line_and_column(redis: Redis, tmp_path: Path) -> None:
    async with open_rest_client(tmp_path, redis) as (client, _, registry):
        for change, status, rule, place, message in REFUSED:
            body = json.dumps({"name": "exact", "source": SOURCE, **change})
            reply = await client.post("", content=body, headers={"content-type": "application/json"})
            refusal = reply.json()
            assert (reply.status_code, message in refusal["detail"]) == (status, True), (change, refusal)
            if rule is not None:
                (problem,) = refusal["problems"]
                assert problem["rule"] == rule, change
                assert "inside" not in problem["traceback"], "it is the function's own"
                actual = (problem["line"], problem["column"])
                assert all(number in (None, other) for number, other in zip(place, actual, strict=True)), change
        assert await registry.names() == []


async def test_a_trial_shows_scores_output_and_the_functions_own_traceback(redis: Redis, tmp_path: Path) -> None:
    body = "print('seen', completions)\n    return [{'a': float(c), 'b': 1} for c in completions]"
    source = f"def reward(completions):\n    {body}\n"
    async with open_rest_client(tmp_path, redis) as (client, _, _):
        await client.post("", json={"name": "parts", "source": source})
        good = (await client.post("/parts/try", json={"rows": [{"completion": "2"}]})).json()
        (result,) = good["results"]
        assert (result["reward"], result["parts"], result["failure"]) == (3.0, {"a": 2.0, "b": 1.0}, None)
        assert (good["output"], good["seconds"] > 0) == ("seen ['2']\n", True)
        (bad,) = (await client.post("/parts/try", json={"rows": [{"completion": "x"}]})).json()["results"]
        assert (bad["reward"], bad["failure"]["kind"]) == (None, "exception")
        assert "could not convert string to float: 'x'" in bad["failure"]["text"]
        assert "line 3, in <listcomp>" in bad["failure"]["traceback"]
        # Nothing of a trial is counted as a call of a run.
        assert (await client.get("/parts/usage")).json()["usage"][0]["calls"] == 0
        mistakes: list[tuple[Any, str]] = [
            ({"actions": ["a"]}, "send `rows`"),
            ({"rows": [{"completions": "2"}]}, "rows.0.completion: Field required"),
            ("{", "the body is not JSON: "),
            ([], "the body: is not a JSON object; send one, with content-type: application/json"),
        ]
        for body, message in mistakes:
            content = body if isinstance(body, str) else json.dumps(body)
            refused = await client.post("/parts/try", content=content, headers={"content-type": "application/json"})
            assert (refused.status_code, message in refused.json()["detail"]) == (422, True), refused.json()


async def test_a_trial_of_an_environment_plays_one_step_after_the_other(redis: Redis, tmp_path: Path) -> None:
    case = {"input": {"task": {"tries": 2, "number": 7}, "actions": ["3", "7"]}, "expected": 1.0}
    body = {"name": "guess", "kind": "environment", "source": ENVIRONMENT, "tests": [case]}
    async with open_rest_client(tmp_path, redis) as (client, _, _):
        assert (await client.post("", json=body)).status_code == 201
        trial = {"task": {"tries": 3, "number": 7}, "actions": ["3", "break", "7"]}
        results = (await client.post("/guess/try", json=trial)).json()["results"]
        assert [(result["observation"], result["reward"], result["done"]) for result in results] == [
            ("Guess.", 0.0, False),
            ("No.", 0.0, False),
            (None, None, None),
        ]
        assert results[-1]["failure"]["kind"] == "exception"
        wrong = await client.post("", json={**body, "tests": [{**case, "expected": 2.0}]})
        assert wrong.json()["detail"] == "tests.0: gave 1, and 2 is expected"


async def test_the_page_at_docs_needs_no_internet(redis: Redis, tmp_path: Path) -> None:
    async with open_rest_client(tmp_path, redis) as (client, _, _):
        for path in ("/docs", "/redoc"):
            page = await httpx.AsyncClient.request(client, "GET", path)
            parts = re.findall(r'(?:src|href)="([^"]+)"', page.text)
            assert (page.status_code, len(parts) >= 2) == (200, True)
            for part in parts:
                assert part.startswith("/")
                assert (await httpx.AsyncClient.request(client, "GET", part)).status_code == 200
            assert not re.findall(r"https?://", page.text)


async def test_tokens_have_roles_and_callers_a_rate(redis: Redis, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# people\nann submit ann-secret-0123456789\nbob read bob-secret-0123456789\n")
    ann, bob = ({"authorization": f"Bearer {name}-secret-0123456789"} for name in ("ann", "bob"))
    body = {"name": "exact", "source": SOURCE}
    async with open_rest_client(tmp_path, redis, tokens=tokens, calls_per_minute=2) as (client, _, _):
        assert (await client.get("")).status_code == 401
        assert (await client.get("", headers={"authorization": "Bearer nobody"})).status_code == 401
        assert (await client.get("", headers=bob)).status_code == 200
        refused = await client.post("", json=body, headers=bob)
        assert (refused.status_code, refused.json()["detail"].startswith("bob has a token to read")) == (403, True)
        assert (await client.post("", json=body, headers=ann)).json()["submitted_by"] == "ann"
        assert (await client.delete("/exact", headers=ann)).status_code == 200
        for status in (200, 200, 429):
            late = await client.post("/exact/try", json={"rows": [], "version": "0" * 8}, headers=ann)
            assert late.status_code == (404 if status == 200 else status)
        assert int(late.headers["retry-after"]) >= 1
        # Too many trials do not keep a caller from submitting.
        assert (await client.post("", json=body, headers=ann)).status_code == 201
        tokens.write_text("bob submit bob-secret-0123456789\n")
        assert (await client.get("", headers=ann)).status_code == 401
        assert (await client.post("", json=body, headers=bob)).status_code == 201


async def test_the_token_is_asked_for_before_the_body(redis: Redis, tmp_path: Path) -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with open_rest_client(tmp_path, redis, service_token="a-secret-0123456789") as (client, _, _):
        for method, path in (("POST", ""), ("POST", "/r/try"), ("POST", "/r/activate"), ("GET", "/nobody")):
            headers = {"content-type": "application/json"}
            refused = await client.request(method, path, content=body(), headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")


async def test_a_submission_imports_only_the_configured_packages(redis: Redis, tmp_path: Path) -> None:
    async with open_rest_client(tmp_path, redis, allowed_packages=("regex",)) as (client, _, _):
        refused = await client.post("", json={"name": "n", "source": "import numpy\n" + SOURCE})
        (problem,) = refused.json()["problems"]
        assert (refused.status_code, "reward.allowed_packages (regex)" in problem["text"]) == (422, True)
        accepted = await client.post("", json={"name": "n", "source": "import regex\n" + SOURCE})
        assert accepted.status_code == 201


async def test_the_configuration_bounds_what_a_submission_asks_for(redis: Redis, tmp_path: Path) -> None:
    async with open_rest_client(tmp_path, redis, memory_mb=1024, timeout_s=5.0) as (client, scorer, registry):
        asked = {"memory_mb": 65536, "timeout_s": 5.5, "cpu_s": 100.0}
        refused = await client.post("", json={"name": "big", "source": SOURCE, "limits": asked})
        slow, memory = refused.json()["problems"]
        assert (refused.status_code, memory["field"], slow["field"]) == (422, "limits.memory_mb", "limits.timeout_s")
        message = (
            "limits.memory_mb: is 65536, and reward.memory_mb allows 1024 at most. Ask for less, or raise that key"
        )
        assert memory["text"] == message.replace("that key", "reward.memory_mb")
        within = {"name": "big", "source": SOURCE, "limits": {"memory_mb": 1024, "timeout_s": 0.5}}
        assert (await client.post("", json=within)).status_code == 201
        # A version that a wider configuration admitted does not run under a narrower one.
        submission = Submission(name="old", source=SOURCE, limits=RequestedLimits(memory_mb=4096))
        content = Content(version=submission.version, kind="reward", source=SOURCE, entry="", limits=submission.limits)
        await registry.submit(submission, content, who="ann")
        rollout = make_rollout("4", answer="4")
        rollout.rewards.append(RewardUse(name="old", weight=1.0))
        (score,) = await scorer.score([rollout])
        assert "limits.memory_mb: is 4096, and reward.memory_mb allows 1024 at most" in score.failure


@pytest.mark.parametrize(
    "wrong",
    [
        {f"field-{number}": 1 for number in range(90_000)},
        {f"field-{'x' * 10_000}-{number}": 1 for number in range(20)},
        {"limits": {f"field-{number}": 1 for number in range(90_000)}},
        {"tests": [{"input": {"completion": "4"}, "expected": {str(number): "x" for number in range(90_000)}}]},
        {"tests": [{"input": 1, "expected": "x"}] * 60},
        {"rows": [{"completion": "4", "prompt": [1] * 90_000}]},
    ],
    ids=["fields", "long names", "limits", "parts", "tests", "messages"],
)
async def test_the_answer_to_bad_input_is_short(redis: Redis, tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = "/r/try" if "rows" in wrong else ""
    async with open_rest_client(tmp_path, redis) as (client, _, _):
        body = json.dumps({"name": "exact", "source": SOURCE, **wrong})
        began = time.process_time()
        reply = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert time.process_time() - began < 1.0
        assert (reply.status_code, len(reply.content) < 50_000) == (422, True)
        assert 1 <= len(reply.json()["problems"]) <= 20


async def test_large_bodies_count_as_many_calls(redis: Redis, tmp_path: Path) -> None:
    async with open_rest_client(tmp_path, redis, calls_per_minute=10) as (client, _, _):
        large = {"rows": [{"completion": "4", "answer": "4", "filler": "x" * 500_000}]}
        assert [(await client.post("/r/try", json=large)).status_code for _ in range(2)] == [200, 429]


async def test_a_body_that_is_too_large_or_of_another_form_is_refused(redis: Redis, tmp_path: Path) -> None:
    async with open_rest_client(tmp_path, redis) as (client, _, _):
        huge = await client.post("", json={"name": "a", "source": "#" * (5 * 2**20)})
        assert (huge.status_code, "bytes" in huge.json()["detail"]) == (413, True)
        nested = await client.post("/r/try", json={"rows": [{"completion": "4", "more": [[]] * 50_000}]})
        assert (nested.status_code, "100000 commas and opening brackets" in nested.json()["detail"]) == (413, True)
        long = await client.post("", json={"name": "a", "source": "#" * (300 * 2**10)})
        assert (long.status_code, long.json()["problems"][0]["field"]) == (422, "source")
        other = await client.post("", content="x", headers={"content-type": "text/plain"})
        assert (other.status_code, "multipart/form-data" in other.json()["detail"]) == (415, True)
        broken = await client.post("", content="{", headers={"content-type": "application/json"})
        assert (broken.status_code, broken.json()["detail"].startswith("the body is not JSON: ")) == (422, True)
        binary = await client.post("", files={"file": ("a.py", b"\xff\xfe\x00")}, data={"name": "a"})
        assert (binary.status_code, binary.json()["problems"][0]["field"]) == (422, "file")
        for coding in ("rot13", "zlib", "punycode", "utf-7", "nonsense"):
            file = f"# coding: {coding}\n{SOURCE}"
            strange = await client.post("", files={"file": ("a.py", file)}, data={"name": "a"})
            assert (strange.status_code, strange.json()["problems"][0]["field"]) == (422, "file")
        old = f"# coding: latin-1\n{SOURCE}# \xe9\n".encode("latin-1")
        assert (await client.post("", files={"file": ("a.py", old)}, data={"name": "a"})).status_code == 201
