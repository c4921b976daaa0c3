"""The reward service as its own process, on a real Redis: rollouts in, scores out, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from redis.asyncio import Redis

from gspo.common.network.grpc_server import token_metadata
from gspo.common.streams.events import Events
from gspo.common.streams.inbox import append
from gspo.common.streams.instances import Instance, list_instances, wait_for_instance
from gspo.common.streams.keys import Keys
from gspo_proto.reward_pb2 import ResetRequest, ScoreRequest, StepRequest
from gspo_proto.reward_pb2_grpc import RewardStub
from gspo_proto.rollout_pb2 import Event, Finished, RewardUse, Scored
from tests.support.reward_rollouts import make_rollout, reward_or_failure
from tests.support.service_process import log_events, make_run, service_process, wait_exit
from tests.support.typed.redis_entries import dead_letters

if TYPE_CHECKING:
    from gspo_proto.reward_pb2_grpc import RewardAsyncStub

pytestmark = pytest.mark.asyncio(loop_scope="function")

SOURCE = """
import time

def score(text):
    if text == "bad":
        raise ValueError("no number")
    if text.startswith("slow"):
        time.sleep(float(text[4:]))
        return 1.0
    return float(text)

def reward(prompts, completions, **columns):
    return [score(text) for text in completions]
"""


ENVIRONMENT = """
def reset(task):
    return {"number": task["number"], "turns": 0}, "Guess."

def step(state, action):
    right = int(action) == state["number"]
    return {**state, "turns": state["turns"] + 1}, "Right." if right else "No.", float(right), right
"""


@contextmanager
def reward_service(folder: Path, redis_url: str, source: str = SOURCE, **sections: Any) -> Iterator[Any]:
    file = folder / "r.py"
    file.write_text(source)
    reward = {"functions": [{"path": str(file)}]} | sections.pop("reward", {})
    config = make_run(folder, folder / "model", reward=reward, **sections)
    with service_process("reward", config, redis_url, log=folder / "log") as process:
        yield process


async def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """The first true value of an asynchronous condition."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if result := await condition():
            return result
        await asyncio.sleep(0.02)
    raise TimeoutError(f"not within {timeout_s} s")


async def scored(redis: Redis, stream: str, count: int) -> dict[tuple[int, int], float | str]:
    """The outcome of each rollout once there are `count` entries."""

    async def all_there() -> Any:
        entries: Any = await redis.xrange(stream)
        return entries if len(entries) >= count else None

    entries = [Scored.FromString(fields[b"d"]).rollout for _, fields in await until(all_there)]
    assert len(entries) == count
    return {(entry.rollout.group, entry.rollout.number): reward_or_failure(entry.score) for entry in entries}


async def ready(redis: Redis, keys: Keys) -> Instance:
    return await wait_for_instance(redis, keys, "reward", 30)


async def test_rollouts_in_scores_out(redis: Redis, redis_url: str, keys: Keys, tmp_path: Path) -> None:
    with reward_service(tmp_path, redis_url) as process:
        await append(
            redis,
            keys.rollouts,
            [make_rollout(t, number=n).SerializeToString() for n, t in enumerate(("1", "bad", "3"))],
        )
        await append(redis, keys.eval_rollouts, [make_rollout("5", group=9).SerializeToString()])
        scores = await scored(redis, keys.scored, 3)
        assert (scores[0, 0], scores[0, 2]) == (1.0, 3.0)
        assert scores[0, 1] == "r: raised ValueError: no number (r.py line 6)"
        assert await scored(redis, keys.eval_scored, 1) == {(9, 0): 5.0}
        assert await redis.xlen(keys.rollouts) == await redis.xlen(keys.eval_rollouts) == 0
        instance = await ready(redis, keys)
        await _look_at_rest(f"http://{instance.http}")
        process.send_signal(signal.SIGTERM)
        assert wait_exit(process, 20) == 0


async def _look_at_rest(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        assert (await client.get("/healthz")).status_code == 200
        health = (await client.get("/readyz")).json()
        assert (health["ready"], health["problems"]) == (True, {})
        assert health["sandbox"].startswith(("bubblewrap (", "landlock ("))
        (shown,) = (await client.get("/v1/rewards")).json()["rewards"]
        assert (shown["name"], shown["kind"], shown["convention"], shown["entry"]) == ("r", "reward", "trl", "reward")
        (usage,) = (await client.get("/v1/rewards/r/usage")).json()["usage"]
        assert (usage["version"], usage["calls"] >= 3, usage["errors"]) == (shown["active"], True, {"exception": 2})
        assert usage["last_failure"]["text"] == "raised ValueError: no number (r.py line 6)"
        assert (await client.get("/v1/rewards/r")).json()["source"].endswith("r.py")
        missing = await client.get("/v1/rewards/rr")
        assert (missing.status_code, missing.json()["detail"]) == (
            404,
            "there is no reward function 'rr'. Did you mean 'r'?",
        )
        figures = (await client.get("/metrics/")).text
    assert 'gspo_rollouts_scored_total{result="failed"} 1.0' in figures
    assert 'gspo_rollouts_scored_total{result="scored"} 3.0' in figures
    assert 'gspo_reward_calls_total{function="r",result="exception"} 2.0' in figures
    assert 'gspo_score_failures_total{kind="exception"} 1.0' in figures
    assert 'gspo_activity_seconds_total{kind="waiting",service="reward",what="rollouts"}' in figures


async def test_grpc_scores_as_the_stream_does(redis: Redis, redis_url: str, keys: Keys, tmp_path: Path) -> None:
    with reward_service(tmp_path, redis_url):
        instance = await ready(redis, keys)
        async with grpc.aio.insecure_channel(instance.grpc) as channel:
            stub = RewardStub(channel)
            reply = await stub.Score(ScoreRequest(rollouts=[make_rollout("2"), make_rollout("bad")]), timeout=20)
            assert [reward_or_failure(score) for score in reply.scores] == [
                2.0,
                "r: raised ValueError: no number (r.py line 6)",
            ]
            await _refuses_what_is_too_much(channel, stub)
            await _play_an_environment(stub, f"http://{instance.http}/v1/rewards")


async def _refuses_what_is_too_much(channel: grpc.aio.Channel, stub: RewardAsyncStub) -> None:
    many = [make_rollout("2") for _ in range(1025)]
    named = make_rollout("2")
    named.rewards.extend(RewardUse(name=f"f{number}") for number in range(65))
    for asked, message in (
        (ScoreRequest(rollouts=many), "1025 rollouts in one Score, and at most 1024 are scored"),
        (ScoreRequest(rollouts=[named]), "65 functions in one Score, and at most 64 are scored"),
        (ScoreRequest(rollouts=[make_rollout("x" * 33 * 2**20)]), "33554432 are scored"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Score(asked, timeout=20)
        assert (refused.value.code(), message in str(refused.value.details())) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            True,
        )
    # 400,000 rollouts of four bytes each: refused before they are read.
    raw: Any = channel.unary_unary("/gspo.Reward/Score", request_serializer=bytes)
    with pytest.raises(grpc.aio.AioRpcError, match="a message has at most 50000 fields"):
        await raw(b"\x0a\x02\x08\x01" * 400_000, timeout=20)


async def _play_an_environment(stub: RewardAsyncStub, url: str) -> None:
    async with httpx.AsyncClient(timeout=20) as client:
        body = {"name": "guess", "kind": "environment", "source": ENVIRONMENT}
        version = (await client.post(url, json=body)).json()["version"]
    reset = await stub.ResetEnvironment(ResetRequest(environment="guess", task_json='{"number": 7}'), timeout=20)
    assert (reset.version, json.loads(reset.observation_json), reset.done) == (version, "Guess.", False)
    request = StepRequest(environment="guess", version=version[:16], state_json=reset.state_json, action="3")
    wrong = await stub.StepEnvironment(request, timeout=20)
    assert (wrong.reward, wrong.done, json.loads(wrong.state_json)) == (0.0, False, {"number": 7, "turns": 1})
    again = await stub.StepEnvironment(request, timeout=20)
    assert again == wrong  # a pure step: the caller keeps the state
    request.state_json, request.action = wrong.state_json, "7"
    right = await stub.StepEnvironment(request, timeout=20)
    assert (right.reward, right.done) == (1.0, True)
    request.action = "seven"
    failed = await stub.StepEnvironment(request, timeout=20)
    assert (failed.failure.kind, failed.reward, failed.version) == ("exception", 0.0, version)
    assert "invalid literal for int()" in failed.failure.text
    for wrong_reset, code in (
        (ResetRequest(environment="gues", task_json="1"), grpc.StatusCode.NOT_FOUND),
        (ResetRequest(environment="guess", task_json="{"), grpc.StatusCode.INVALID_ARGUMENT),
        (ResetRequest(environment="r", task_json="1"), grpc.StatusCode.FAILED_PRECONDITION),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ResetEnvironment(wrong_reset, timeout=20)
        assert error.value.code() is code


async def test_a_function_is_replaced_while_rollouts_come(
    redis: Redis, redis_url: str, keys: Keys, tmp_path: Path
) -> None:
    """Two replicas, one of them killed; every rollout is scored once, and its score names the version it is of."""
    config = make_run(tmp_path, tmp_path / "model", services={"lease_s": 1.0})
    source = "def reward(completions):\n    return [{} + 0 * len(text) for text in completions]\n"
    with (
        service_process("reward", config, redis_url, "--name", "reward-0", log=tmp_path / "log") as process,
        service_process("reward", config, redis_url, "--name", "reward-1", log=tmp_path / "log"),
    ):

        async def both() -> Any:
            started = [instance for instance in await list_instances(redis, keys, "reward") if instance.grpc]
            return started if len(started) == 2 else None

        first, second = [instance.http for instance in await until(both, 60)]
        async with httpx.AsyncClient(timeout=30) as client:
            old = (
                await client.post(f"http://{first}/v1/rewards", json={"name": "it", "source": source.format(1.0)})
            ).json()
            await append(redis, keys.rollouts, [_asking("it", number) for number in range(200)])
            new = (
                await client.post(f"http://{second}/v1/rewards", json={"name": "it", "source": source.format(2.0)})
            ).json()
            assert (old["active"], new["active"]) == (True, False)
            await client.post(f"http://{second}/v1/rewards/it/activate", json={"version": new["version"]})
            process.kill()
            await append(redis, keys.rollouts, [_asking("it", number) for number in range(200, 400)])
        rewards = await scored(redis, keys.scored, 400)
        assert {rewards[0, number] for number in range(200, 400)} == {2.0}
        assert {rewards[0, number] for number in range(200)} <= {1.0, 2.0}
        entries: Any = await redis.xrange(keys.scored)
        scores = [Scored.FromString(fields[b"d"]).rollout.score for _, fields in entries]
        versions = {1.0: old["version"], 2.0: new["version"]}
        assert all(score.version == versions[score.reward] == score.parts[0].version for score in scores)


def _asking(name: str, number: int) -> bytes:
    rollout = make_rollout("x", number=number)
    rollout.rewards.append(RewardUse(name=name, weight=1.0))
    return rollout.SerializeToString()


async def test_tokens_guard_grpc_and_http(redis: Redis, redis_url: str, keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-secret-of-tests\n")
    (tmp_path / "tokens").write_text("ann submit ann-secret-0123456789\nbob read bob-secret-0123456789\n")
    tokens = {"tokens": str(tmp_path / "tokens")}
    with reward_service(tmp_path, redis_url, services={"token_file": str(tmp_path / "token")}, reward=tokens):
        instance = await ready(redis, keys)
        async with httpx.AsyncClient(base_url=f"http://{instance.http}", timeout=10) as client:
            assert (await client.get("/v1/rewards")).status_code == 401
            assert (await client.get("/readyz")).status_code == 200
            headers = {"Authorization": "Bearer a-secret-of-tests"}
            assert (await client.get("/v1/rewards", headers=headers)).status_code == 200
        async with grpc.aio.insecure_channel(instance.grpc) as channel:
            stub, asked = RewardStub(channel), ScoreRequest(rollouts=[make_rollout("1")])
            for token in ("", "nobody", "ann-secret-0123456788"):
                with pytest.raises(grpc.aio.AioRpcError, match="token is missing or wrong") as refused:
                    await stub.Score(asked, timeout=5, metadata=token_metadata(token))
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            for token in ("a-secret-of-tests", "ann-secret-0123456789", "bob-secret-0123456789"):
                reply = await stub.Score(asked, timeout=5, metadata=token_metadata(token))
                assert reply.scores[0].reward == 1.0
            asking = StepRequest(environment="none", state_json="{}", action="x")
            with pytest.raises(grpc.aio.AioRpcError) as missing:
                await stub.StepEnvironment(asking, timeout=5, metadata=token_metadata("bob-secret-0123456789"))
            assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_function_that_fails_too_often_is_reported_with_its_own_error(
    redis: Redis, redis_url: str, keys: Keys, tmp_path: Path
) -> None:
    limits = {"max_failure_share": 0.5, "failure_window": 4}
    with reward_service(tmp_path, redis_url, reward=limits):
        texts = ("bad", "1", "bad", "bad")
        await append(redis, keys.eval_rollouts, [make_rollout("bad", group=9).SerializeToString()])
        await append(redis, keys.rollouts, [make_rollout(t, number=n).SerializeToString() for n, t in enumerate(texts)])
        await scored(redis, keys.scored, 4)

        async def problems() -> list[str]:
            events = await Events(redis, keys, "test").read(b"0", 0.1)
            return [event.scoring_fails.reason for _, event in events if event.HasField("scoring_fails")]

        (reason,) = await until(problems)
    assert reason.startswith("75% of the last 4 scores failed (3 exception), more than reward.max_failure_share 0.5")
    assert reason.endswith("the last one: r: raised ValueError: no number (r.py line 6)")


async def test_a_slow_function_does_not_hold_up_another_in_the_stream(
    redis: Redis, redis_url: str, keys: Keys, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\ndef reward(completions):\n    time.sleep(2)\n    return [9.0] * len(completions)\n"
    )
    (tmp_path / "r.py").write_text(SOURCE)
    functions = [{"path": str(tmp_path / name)} for name in ("r.py", "slow.py")]
    with reward_service(tmp_path, redis_url, reward={"functions": functions}):
        await ready(redis, keys)
        rollouts = []
        for number, name in enumerate(("slow", "r", "slow", "r")):
            rollout = make_rollout(str(number), number=number)
            rollout.rewards.add(name=name, weight=1.0)
            rollouts.append(rollout.SerializeToString())
        await append(redis, keys.rollouts, rollouts)
        assert await scored(redis, keys.scored, 2) == {(0, 1): 1.0, (0, 3): 3.0}
        assert (await scored(redis, keys.scored, 4))[0, 0] == 9.0


async def test_the_lease_is_kept_during_a_slow_function(
    redis: Redis, redis_url: str, keys: Keys, tmp_path: Path
) -> None:
    with reward_service(tmp_path, redis_url, services={"lease_s": 0.6}):
        await append(redis, keys.rollouts, [make_rollout("slow2.5").SerializeToString()])

        async def leased() -> Any:
            return await redis.xpending_range(keys.rollouts, "reward", "-", "+", 1)

        (first,) = await until(leased)
        idle = []
        while pending := await leased():
            idle.append(pending[0]["time_since_delivered"])
            assert (pending[0]["times_delivered"], pending[0]["consumer"]) == (1, first["consumer"])
            await asyncio.sleep(0.05)
        assert len(idle) > 10
        assert max(idle) < 600
        assert await scored(redis, keys.scored, 1) == {(0, 0): 1.0}


async def test_another_replica_takes_over_the_entries_of_a_killed_one(
    redis: Redis, redis_url: str, keys: Keys, tmp_path: Path
) -> None:
    with reward_service(tmp_path, redis_url, services={"lease_s": 0.6}) as process:
        await append(redis, keys.rollouts, [make_rollout("slow1").SerializeToString()])

        async def leased() -> Any:
            return await redis.xpending_range(keys.rollouts, "reward", "-", "+", 1)

        await until(leased)
        process.kill()
        process.wait()
    with reward_service(tmp_path, redis_url, services={"lease_s": 0.6}):
        assert await scored(redis, keys.scored, 1) == {(0, 0): 1.0}


async def test_a_rollout_that_every_scorer_was_lost_over_is_a_failure_and_a_dead_letter(
    redis: Redis, redis_url: str, keys: Keys, tmp_path: Path
) -> None:
    await append(redis, keys.rollouts, [make_rollout("1").SerializeToString()])
    taken: Any = await redis.xreadgroup("reward", "lost", {keys.rollouts: ">"})
    ((entry, _),) = taken[0][1]
    await redis.xclaim(keys.rollouts, "reward", "lost", 0, [entry], idle=10_000, retrycount=5)
    with reward_service(tmp_path, redis_url, services={"lease_s": 0.6}):
        reason = "handed out 5 times and never finished"
        assert await scored(redis, keys.scored, 1) == {(0, 0): f"{reason}: every scorer that took it was lost"}
    assert [letter.reason for letter in await dead_letters(redis, keys)] == [reason]


async def test_sigterm_finishes_what_is_in_hand(redis: Redis, redis_url: str, keys: Keys, tmp_path: Path) -> None:
    with reward_service(tmp_path, redis_url) as process:
        await ready(redis, keys)
        await append(redis, keys.rollouts, [make_rollout("slow1").SerializeToString()])

        async def leased() -> Any:
            return await redis.xpending_range(keys.rollouts, "reward", "-", "+", 1)

        await until(leased)
        process.send_signal(signal.SIGTERM)
        assert wait_exit(process, 20) == 0
        assert await scored(redis, keys.scored, 1) == {(0, 0): 1.0}


async def test_it_ends_by_itself_when_the_run_is_finished(
    redis: Redis, redis_url: str, keys: Keys, tmp_path: Path
) -> None:
    events = Events(redis, keys, "test")
    await events.send(Event(finished=Finished(reason="an earlier life")))
    with reward_service(tmp_path, redis_url) as process:
        await ready(redis, keys)
        await append(redis, keys.rollouts, [make_rollout("1").SerializeToString()])
        await scored(redis, keys.scored, 1)
        await asyncio.sleep(1.5)  # the end of an earlier run would have stopped the service by now
        assert process.poll() is None
        await events.send(Event(finished=Finished(reason="done")))
        assert wait_exit(process, 20) == 0


async def test_an_entry_that_is_no_rollout_is_a_dead_letter(
    redis: Redis, redis_url: str, keys: Keys, tmp_path: Path
) -> None:
    other = make_rollout("1")
    other.schema = 99
    with reward_service(tmp_path, redis_url):
        await append(
            redis, keys.rollouts, [b"\xff\xff", other.SerializeToString(), make_rollout("1").SerializeToString()]
        )
        assert await scored(redis, keys.scored, 1) == {(0, 0): 1.0}
        unreadable = await dead_letters(redis, keys)
        assert [letter.payload for letter in unreadable] == [b"\xff\xff", other.SerializeToString()]
        assert "schema 99" in unreadable[1].reason
        assert await redis.xlen(keys.rollouts) == 0


async def test_a_file_that_cannot_be_loaded_ends_the_service_with_two(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    with reward_service(tmp_path, redis_url, source="def score(x): ...") as process:
        assert wait_exit(process, 30) == 2
    assert "holds no reward function" in log_events(tmp_path / "log")[-1]["reason"]


async def test_it_needs_no_torch_and_no_engine(redis: Redis, redis_url: str, keys: Keys, tmp_path: Path) -> None:
    blocked = ("torch", "vllm", "deepspeed", "transformers")
    file = tmp_path / "r.py"
    file.write_text(SOURCE)
    config = make_run(tmp_path, tmp_path / "model", reward={"functions": [{"path": str(file)}]})
    program = (
        "import runpy, sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "sys.argv[0] = 'gspo.reward'\n"
        "runpy.run_module('gspo.reward', run_name='__main__', alter_sys=False)\n"
    )
    command = [sys.executable, "-c", program, "--run-dir", str(config.run_dir), "--redis-url", redis_url]
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    await append(redis, keys.rollouts, [make_rollout("1").SerializeToString()])
    try:
        assert await scored(redis, keys.scored, 1) == {(0, 0): 1.0}
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    assert [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines()][-1] == "service_ended"
