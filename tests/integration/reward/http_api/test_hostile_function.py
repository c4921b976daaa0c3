"""A hostile function beside a good one, over the whole path: Scorer, gRPC, a trial over REST, a submission.

Its forged answers cost its own rollouts their scores, and no other rollout.
"""

from __future__ import annotations

import asyncio
import json
import resource
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from redis.asyncio import Redis

from gspo.common.network.grpc_server import GrpcApi, GrpcServer
from gspo.common.streams.entries import SCHEMA
from gspo.reward.functions import library
from gspo.reward.registry.records import Submission
from gspo.reward.scoring.scorer import Scorer
from gspo.reward.servicer import GRPC_SERVICE, RewardServicer
from gspo.reward.submissions import admission
from gspo.reward.submissions.trials import rollout_of
from gspo_proto.reward_pb2 import ScoreRequest, StepRequest
from gspo_proto.reward_pb2_grpc import RewardStub, add_RewardServicer_to_server
from gspo_proto.rollout_pb2 import RewardUse, Rollout, Score
from tests.integration.reward.http_api.rest_client import SOURCE, open_rest_client

pytestmark = pytest.mark.asyncio(loop_scope="function")

# Answers with the text of the completion, under the id of the harness's own question. It scores a completion that is
# not JSON.
FORGER = """
import json, os, sys

def say(text):
    frame = sys._getframe()
    while "id" not in frame.f_locals.get("question", ()):
        frame = frame.f_back
    answer = eval(text)
    if isinstance(answer, dict):
        answer["id"] = frame.f_locals["question"]["id"]
    os.write(3, answer if isinstance(answer, bytes) else sys.modules["inside.frames"].frame(answer))

def reward(completions):
    for completion in completions:
        if completion.startswith("{") or completion.startswith("b'"):
            say(completion)
    return [1.0] * len(completions)
"""
# Its forged answers, each with the kinds of failure that it may cause.
SAID = {
    "{'values': [{'error': {'kind': {}}}]}": ("exception",),
    "{'values': [{'error': {'kind': []}}]}": ("exception",),
    "{'error': {'kind': {}}}": ("forbidden",),
    "{'values': 5}": ("forbidden",),
    "{'values': None}": ("forbidden",),
    "{'values': [10**400]}": ("invalid_return",),
    "{'values': [float('nan')]}": ("invalid_return",),
    "{'values': [{'parts': {'a': 1e308, 'b': 1e308}}]}": ("invalid_return",),
    "{'values': [{'parts': {5: 1.0}}]}": ("invalid_return",),
    "{'values': [1.0, 2.0]}": ("invalid_return",),
    "{'values': [{'error': {'kind': 'crash', 'text': 'x' * 10**6}}]}": ("output_too_large",),
    "{'signature': {'entry': 5}}": ("forbidden",),
    "b'\\0' * 8": ("forbidden",),
    "b'\\0\\0\\0\\0\\0\\0\\0\\1\\xc1'": ("forbidden",),
    "b'\\1\\0\\0\\0\\0\\0\\0\\2{}'": ("forbidden",),
    "b'\\0\\0\\0\\0\\0\\0\\0\\5\\xdd\\xff\\xff\\xff\\xff'": ("forbidden",),
}
NO_SIGNATURE = "{'signature': {'entry': 5, 'convention': ['x'], 'takes': 'abc', 'required': [], 'takes_any': 1}}"
BAD_STEPS = """
def reset(task): return task, "go"
def step(state, action):
    rewards = {"huge": 10**400, "inf": 1e400, "text": "1", "ok": 1}
    return state, "\\ud800" if action == "half" else "x", rewards.get(action, 1.0), False
"""


def asking(name: str, text: str) -> Rollout:
    rollout = rollout_of({"prompt": "2+2=", "completion": text, "answer": text})
    rollout.schema, rollout.attempt, rollout.num_rollouts = SCHEMA, 1, 1
    rollout.rewards.append(RewardUse(name=name, weight=1.0))
    return rollout


async def submit(client: httpx.AsyncClient, name: str, source: str, **more: Any) -> httpx.Response:
    return await client.post("", json={"name": name, "source": source, **more})


async def test_a_hostile_function_costs_no_other_rollout_its_score(redis: Redis, tmp_path: Path) -> None:
    async with open_rest_client(tmp_path, redis, workers=2) as (client, scorer, _):
        for name, source in (("forger", FORGER), ("exact", SOURCE)):
            assert (await submit(client, name, source)).status_code == 201
        assert (await submit(client, "steps", BAD_STEPS, kind="environment")).status_code == 201
        refused = await submit(client, "unknown", f"{FORGER}\nsay({NO_SIGNATURE!r})\n")
        assert (refused.status_code, refused.json()["problems"][0]["rule"]) == (422, "load")
        assert (await client.get("")).status_code == 200
        early = {"entry": "reward", "convention": "trl", "takes": ["completions"], "required": [], "takes_any": False}
        assert (await submit(client, "early", f"{FORGER}\nsay({repr({'signature': early})!r})\n")).status_code == 201
        (score,) = await scorer.score([asking("early", "4")], session="run")
        assert score.failure_kind == "forbidden"
        batch = [asking(name, text) for text in SAID for name in ("forger", "exact")]
        check_scores(await scorer.score(batch, session="run"))
        async with serving(scorer) as stub:
            check_scores((await stub.Score(ScoreRequest(rollouts=batch))).scores)
            for action in ("huge", "inf", "text"):
                reply = await stub.StepEnvironment(StepRequest(environment="steps", state_json="{}", action=action))
                assert reply.failure.kind == "invalid_return", action
            reply = await stub.StepEnvironment(StepRequest(environment="steps", state_json="{}", action="half"))
            assert (json.loads(reply.observation_json), reply.reward) == ("?", 1.0)
        tried = [client.post("/forger/try", json={"rows": [{"completion": text}]}) for text in SAID]
        for reply, kinds in zip(await asyncio.gather(*tried), SAID.values(), strict=True):
            assert reply.status_code == 200, reply.text
            (result,) = reply.json()["results"]
            assert result["failure"]["kind"] in kinds
            assert len(result["failure"]["text"]) < 5000
        steps = {"task": {}, "actions": ["ok", "half", "huge"]}
        assert (await client.post("/steps/try", json=steps)).status_code == 200


def check_scores(scores: Any) -> None:
    assert len(scores) == 2 * len(SAID)
    for text, forged, good in zip(SAID, scores[::2], scores[1::2], strict=True):
        assert isinstance(forged, Score)
        assert forged.failure_kind in SAID[text], (text, forged)
        assert good.reward == 1.0, good


class serving:  # noqa: N801 - used as a function
    """The servicer of a scorer on a port of its own, and a client of it."""

    def __init__(self, scorer: Scorer) -> None:
        servicer = RewardServicer(scorer, session="grpc")
        api = GrpcApi(GRPC_SERVICE, lambda server: add_RewardServicer_to_server(servicer, server))
        self._server = GrpcServer(api, host="127.0.0.1", port=0, token="")

    async def __aenter__(self) -> Any:
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(self._server.address)
        return RewardStub(self._channel)

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._server.stop(1.0)


async def test_a_fault_of_the_service_over_one_function_is_a_failure_of_its_answers_alone(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rest_client(tmp_path, redis) as (client, scorer, _):
        assert (await submit(client, "exact", SOURCE)).status_code == 201
        function = await scorer.library.find("exact")
        monkeypatch.setattr(function.callee, "_signature", None)
        broken, good = await scorer.score([asking("exact", "4"), asking("r", "4")])
        assert (broken.failure_kind, good.reward) == ("exception", 0.0)
        assert "could not be taken: RuntimeError" in broken.failure


async def test_a_function_is_scored_by_while_as_many_as_are_kept_loaded_are_busy(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MAX_LOADED", 1)
    async with open_rest_client(tmp_path, redis) as (client, scorer, _):
        for name in ("busy", "exact"):
            assert (await submit(client, name, SOURCE)).status_code == 201
        busy = await scorer.library.find("busy")
        busy.calls_in_flight += 1
        (score,) = await scorer.score([asking("exact", "4")])
        busy.calls_in_flight -= 1
        assert (score.reward, score.failure) == (1.0, "")
        functions = await asyncio.gather(*(scorer.library.find(name) for name in ("busy", "exact") * 3))
        assert [function.code.name for function in functions] == ["busy", "exact"] * 3


def nested(depth: int) -> str:
    lines = [f"{' ' * level}try:\n{' ' * level} return 1\n{' ' * level}finally:" for level in range(1, depth + 1)]
    return "def bomb():\n" + "\n".join(lines) + f"\n{' ' * (depth + 1)}pass\n{SOURCE}"


async def test_sources_that_compile_to_more_than_any_memory_are_refused_while_others_are_served(
    redis: Redis, tmp_path: Path
) -> None:
    used_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with open_rest_client(tmp_path, redis) as (client, _, _):
        bomb = asyncio.create_task(submit(client, "bomb", nested(15)))
        waits_s = []
        while not bomb.done():
            began = asyncio.get_running_loop().time()
            await asyncio.sleep(0.01)
            waits_s.append(asyncio.get_running_loop().time() - began)
        refused = await bomb
        assert (refused.status_code, refused.json()["problems"][0]["rule"]) == (422, "syntax")
        assert "cannot be compiled" in refused.json()["detail"]
    assert max(waits_s) < 1.0, "nothing of it was done in the service's loop"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used_kb < 200_000


async def test_a_good_submission_is_admitted_beside_hanging_ones(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "LOAD_TIMEOUT_S", 6.0)
    async with open_rest_client(tmp_path, redis) as (client, _, _):
        hanging = [
            asyncio.create_task(submit(client, f"hangs{number}", f"import time\ntime.sleep(60)  # {number}\n{SOURCE}"))
            for number in range(4)
        ]
        await asyncio.sleep(0)
        good = asyncio.create_task(submit(client, "good", SOURCE))
        await asyncio.wait({good, *hanging}, return_when=asyncio.FIRST_COMPLETED)
        assert good.done() and not any(call.done() for call in hanging)
        assert good.result().status_code == 201
        for call in hanging:
            call.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def test_a_caller_has_one_slot(redis: Redis, tmp_path: Path) -> None:
    async with open_rest_client(tmp_path, redis) as (_, scorer, _):
        admitting = admission.Admission(scorer.library, ())
        num_running, most, four = 0, dict[str, int](), asyncio.Barrier(4)

        async def run_now(submission: Submission, *_: object) -> Any:
            nonlocal num_running
            num_running += 1
            most[submission.name] = max(most.get(submission.name, 0), num_running)
            if submission.name == "all":
                await asyncio.wait_for(four.wait(), 30)
            num_running -= 1

        admitting._run_now = run_now  # type: ignore[assignment]
        for name, callers in (("ann", ["ann"] * 3), ("all", ["ann", "bob", "anonymous", "anonymous"])):
            handed_in = [Submission(name=name, source=f"x = {name!r}, {index}") for index in range(len(callers))]
            await asyncio.gather(*(admitting.admit(*pair) for pair in zip(handed_in, callers, strict=True)))
        assert most == {"ann": 1, "all": 4}
