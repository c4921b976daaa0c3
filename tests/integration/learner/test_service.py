"""The learner as a process, fed with scored rollouts: steps, settlements, replay after a kill, the end.

No generator is needed: what it publishes is checked by the digests in its log.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from redis.asyncio import Redis

from gspo.common.network.grpc_server import open_channel
from gspo.common.streams.events import Events
from gspo.common.streams.gpu_engines import GpuEngine, GpuEngines
from gspo.common.streams.inbox import append
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import Keys
from gspo_proto.learner_pb2 import CheckpointRequest, ProgressRequest
from gspo_proto.learner_pb2_grpc import LearnerStub
from gspo_proto.rollout_pb2 import (
    RUN_END_FAILED,
    RUN_END_STOPPED,
    EvaluationDone,
    Event,
    Finished,
    GroupFailure,
    Scored,
    StopRequested,
)
from tests.support.push_peers import generator
from tests.support.service_process import assert_on_loopback_alone, registered, service_process, wait_exit
from tests.support.training.learner_feed import NUM_ROLLOUTS, LearnerFeed, lines, run_of, scored

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(300)]


async def test_a_kill_between_log_and_checkpoint_costs_nothing(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = run_of(tmp_path, learner={"token_records": True})
    feeder = LearnerFeed(redis, keys)
    with service_process("learner", config, redis_url) as first:
        instance = await registered(first, redis, keys, "learner")
        assert_on_loopback_alone(first.pid, *filter(None, (instance.http, instance.grpc)))
        await feeder.feed(range(4), 0)
        await feeder.event("step_done", num=1)
        await feeder.feed(range(4, 8), 1)
        await feeder.event("step_done", num=2)
        # Half a batch is in the learner's hands, taken and not acknowledged.
        await feeder.feed(range(8, 10), 2)
        await asyncio.sleep(1)
        first.send_signal(signal.SIGKILL)
        first.wait(10)
    recorded = lines(config, "policy.jsonl")
    assert [line["version"] for line in recorded] == [0, 1, 2]
    assert len({line["digest"] for line in recorded}) == 3
    assert not list((config.run_dir / "checkpoints").iterdir())

    with service_process("learner", config, redis_url, "--resume"):
        await feeder.feed(range(10, 12), 2)
        # Late copies of logged rollouts are not trained again.
        await append(redis, keys.scored, [scored(0, 0, 0), scored(5, 1, 1)])
        training_done = (await feeder.event("training_done")).training_done
        assert (training_done.step, training_done.reason) == (3, "total_steps 3 reached")
        await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
    # The replay made the same bits: no version was recorded anew.
    versions = lines(config, "policy.jsonl")
    assert versions[:3] == recorded
    assert [line["version"] for line in versions] == [0, 1, 2, 3]
    assert [line["step"] for line in lines(config, "metrics.jsonl")] == [1, 2, 3]
    tables = [pq.read_table(path) for path in sorted((config.run_dir / "log").glob("step-*.parquet"))]
    ids = [(row["group"], row["number"]) for table in tables for row in table.to_pylist()]
    records = [pq.read_table(path) for path in sorted((config.run_dir / "log").glob("tokens-*.parquet"))]
    assert len(records) == 3
    assert sorted((row["group"], row["number"]) for table in records for row in table.to_pylist()) == sorted(ids)
    assert sorted(ids) == [(group, number) for group in range(12) for number in range(4)]
    assert (await redis.xpending(keys.scored, "learner"))["pending"] == 0
    assert await redis.xlen(keys.scored) == 0
    assert (config.run_dir / "export" / "config.json").is_file()


async def test_a_stop_leaves_a_checkpoint_and_open_groups(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = run_of(tmp_path)
    feeder = LearnerFeed(redis, keys)
    with service_process("learner", config, redis_url) as process:
        instance = await registered(process, redis, keys, "learner")
        await feeder.feed(range(6), 0)
        await feeder.event("step_done")
        async with open_channel(instance.grpc) as channel:
            progress = await LearnerStub(channel).Progress(ProgressRequest(), timeout=5)
            assert (progress.step, progress.version, dict(progress.counts)["trained"]) == (1, 1, 4)
            assert [(r.first, r.last) for r in progress.settled] == [(0, 3)]
            written = await LearnerStub(channel).Checkpoint(CheckpointRequest(), timeout=30)
            assert written.step == 1 and Path(written.path, "manifest.json").is_file()
        await Events(redis, keys, "coordinator").send(Event(stop_requested=StopRequested(reason="Ctrl-C")))
        done = (await feeder.event("training_done")).training_done
        assert (done.end, done.reason) == (RUN_END_STOPPED, "stopped: Ctrl-C")
        await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="stopped")))
        assert await asyncio.to_thread(wait_exit, process, 20) == 0
    assert not (config.run_dir / "log" / "settled.jsonl").read_text()
    assert (await redis.xpending(keys.scored, "learner"))["pending"] == 2 * NUM_ROLLOUTS


@pytest.mark.long
async def test_a_stop_while_a_generator_keeps_the_gpus_ends_as_stopped_and_a_resume_trains_the_logged_step(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = run_of(tmp_path, placement="shared", staleness={"max_lag": 0}, run={"total_steps": 1})
    feeder, engines = LearnerFeed(redis, keys), GpuEngines(redis, keys)
    with service_process("learner", config, redis_url) as process:
        await registered(process, redis, keys, "learner")
        await engines.keep("uid", GpuEngine("generation-0", "node-1", is_supervised=True))
        await feeder.feed(range(4), 0)
        async with asyncio.timeout(30):
            while (await list_instances(redis, keys, "learner"))[0].activity["what"] != "generators":
                await asyncio.sleep(0.1)
        await Events(redis, keys, "coordinator").send(Event(stop_requested=StopRequested(reason="Ctrl-C")))
        done = (await feeder.event("training_done")).training_done
        assert (done.step, done.end, done.reason) == (0, RUN_END_STOPPED, "stopped: Ctrl-C")
        await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="stopped")))
        assert await asyncio.to_thread(wait_exit, process, 20) == 0
    assert [path.name for path in (config.run_dir / "log").glob("*.parquet")] == ["step-000001.parquet"]
    assert [line["version"] for line in lines(config, "policy.jsonl")] == [0]
    await engines.forget("uid")
    with service_process("learner", config, redis_url, "--resume"):
        done = (await feeder.event("training_done", num=2)).training_done
        assert (done.step, done.reason) == (1, "total_steps 1 reached")
        await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
    assert [line["version"] for line in lines(config, "policy.jsonl")] == [0, 1]


@pytest.mark.long
async def test_groups_left_open_at_the_end_are_unused_until_a_resume_and_a_failed_group_has_its_reason(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = run_of(tmp_path, run={"total_steps": 1})
    feeder = LearnerFeed(redis, keys)
    with service_process("learner", config, redis_url) as process:
        await registered(process, redis, keys, "learner")
        await feeder.feed(range(2), 0, failing=True)
        await redis.hset(keys.open, "2", '{"min_version": 0}')
        failure = GroupFailure(group=2, attempt=3, reason="generation: no engine took it")
        await append(redis, keys.scored, [Scored(schema=1, failure=failure).SerializeToString()])
        await feeder.feed(range(3, 9), 0)
        # Scorers still have a rollout of each of three groups, which end as trained, failed and unused.
        await redis.set(keys.redis_epoch, "first")
        reports: dict[Any, Any] = {"3-9": "0 5 5 1 1-0:1", "2-9": "0 20 20 1 1-0:1", "8-9": "0 30 30 1 1-0:1"}
        await redis.hset(keys.rollout_tokens, mapping=reports)
        await redis.hincrby(keys.tokens, "in_flight", 55)
        await feeder.event("training_done")
        await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
    settled = {line["group"]: (line["settlement"], line["reason"]) for line in lines(config, "settled.jsonl")}
    assert settled[0][0] == settled[1][0] == settled[2][0] == "failed"
    assert "ZeroDivisionError" in settled[0][1] and "no engine took it" in settled[2][1]
    assert {group for group, (how, _) in settled.items() if how == "unused"} == {7, 8}
    tokens = lines(config, "ledger.jsonl")[-1]["tokens"]
    assert (tokens["in_flight"], tokens["superseded"]) == (0, 5)
    assert not await redis.exists(keys.rollout_tokens)
    # A resume with more steps takes them back, and trains them.
    config = run_of(tmp_path, run={"total_steps": 2})
    with service_process("learner", config, redis_url, "--resume") as process:
        instance = await registered(process, redis, keys, "learner")
        async with open_channel(instance.grpc) as channel:
            progress = await LearnerStub(channel).Progress(ProgressRequest(), timeout=5)
        assert [(r.first, r.last) for r in progress.settled] == [(0, 6)]
        await feeder.feed(range(7, 11), 1)
        assert (await feeder.event("training_done", num=2)).training_done.step == 2
        await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
    assert set(pq.read_table(config.run_dir / "log/step-000002.parquet")["group"].to_pylist()) == {7, 8, 9, 10}


async def test_a_reward_that_always_fails_ends_the_run_with_its_reason(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = run_of(tmp_path, algorithm={"max_refill": 2})
    feeder = LearnerFeed(redis, keys)
    with service_process("learner", config, redis_url) as process:
        await registered(process, redis, keys, "learner")
        await feeder.feed(range(8), 0, failing=True)
        finished = (await feeder.event("finished")).finished
        assert finished.end == RUN_END_FAILED and "ZeroDivisionError: division by zero" in finished.reason
        assert await asyncio.to_thread(wait_exit, process, 20) == 0


@pytest.mark.long
async def test_newer_weights_wait_for_an_evaluation_and_the_best_version_is_kept(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "e.jsonl").write_text('{"prompt": "1+1="}\n')
    evaluation = {"prompts": str(tmp_path / "e.jsonl"), "every": 1, "keep_best": "sampled_mean"}
    config = run_of(tmp_path, evaluation=evaluation, run={"total_steps": 3})
    feeder, coordinator = LearnerFeed(redis, keys), Events(redis, keys, "coordinator")

    async def measured(version: int, score: float) -> None:
        done = EvaluationDone(evaluation=f"v{version}", version=version, step=version, score=score)
        await coordinator.send(Event(evaluation_done=done))

    async def recorded_version(version: int) -> None:
        async with asyncio.timeout(120):
            while lines(config, "policy.jsonl")[-1]["version"] < version:
                await asyncio.sleep(0.05)

    async def until_waiting_for(label: str, *, killed: str = "") -> str:
        """The uid of the learner that waits for an evaluation; a killed one stays registered for a while."""
        async with asyncio.timeout(120):
            while True:
                for instance in await list_instances(redis, keys, "learner"):
                    activity = tuple(instance.activity[key] for key in ("kind", "what", "detail"))
                    if instance.uid != killed and activity == ("waiting", "evaluation", label):
                        return instance.uid
                await asyncio.sleep(0.1)

    def best() -> int:
        return int(json.loads((config.run_dir / "best" / "best.json").read_text())["version"])

    with service_process("learner", config, redis_url) as process:
        await registered(process, redis, keys, "learner")
        await measured(0, 0.25)
        await feeder.feed(range(4), 0)
        await feeder.event("step_done")
        await feeder.feed(range(4, 8), 1)
        await recorded_version(2)
        killed = await until_waiting_for("v1")
        assert [line["step"] for line in lines(config, "metrics.jsonl")] == [1], "version 2 waits for the figures of 1"
        assert best() == 0
        await measured(1, 0.75)
        await feeder.event("step_done", num=2)
        assert lines(config, "metrics.jsonl")[1]["figures"]["hold_s"] > 0.0
        assert best() == 1
        await feeder.feed(range(8, 12), 2)
        await recorded_version(3)
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    # Killed while version 3 waits for the figures of version 2, whose weights are in its candidate alone.
    assert (config.run_dir / "candidates" / "step-000002" / "model.safetensors").is_file()
    with service_process("learner", config, redis_url, "--resume") as process:
        await until_waiting_for("v2", killed=killed)
        await measured(2, 0.5)
        await feeder.event("training_done", timeout_s=120)
        assert not (config.run_dir / "candidates" / "step-000002").exists()
        assert best() == 1
        await measured(3, 0.875)
        await coordinator.send(Event(finished=Finished(reason="done")))
        assert await asyncio.to_thread(wait_exit, process, 20) == 0
    assert best() == 3
    assert (config.run_dir / "best" / "model.safetensors").read_bytes() == (
        config.run_dir / "export" / "model.safetensors"
    ).read_bytes()
    assert [line["score"] for line in lines(config, "evaluations.jsonl")] == [0.25, 0.75, 0.5, 0.875]


async def test_progress_counts_a_group_as_settled_only_with_the_version_made_of_it(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    """Slots freed while their batch is still trained would be filled from weights that are too old."""
    config = run_of(tmp_path)
    feeder = LearnerFeed(redis, keys)
    with service_process("learner", config, redis_url) as process:
        instance = await registered(process, redis, keys, "learner")
        async with open_channel(instance.grpc) as channel:
            await feeder.feed(range(4), 0)
            seen: set[tuple[int, int] | str] = set()
            while (1, 1) not in seen:
                progress = await LearnerStub(channel).Progress(ProgressRequest(), timeout=5)
                seen.add((progress.version, len(progress.settled)))
                logged = (config.run_dir / "log" / "step-000001.parquet").exists()
                seen.add("logged, not trained" if logged and progress.version == 0 else "other")
                await asyncio.sleep(0.005)
    assert (0, 1) not in seen
    assert "logged, not trained" in seen, "the step was over before it could be looked at"


@pytest.mark.long
async def test_a_mini_batch_that_is_not_finite_is_in_the_log_and_a_replay_leaves_it_out(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = run_of(tmp_path, algorithm={"adv_estimator": "reinforce"}, run={"total_steps": 2})
    feeder = LearnerFeed(redis, keys)
    with service_process("learner", config, redis_url) as process:
        await registered(process, redis, keys, "learner")
        # No engine serves here, so run.total_hours does not count the time before the first step.
        await asyncio.sleep(2)
        # One reward as large as may be: float32 holds its gradient, and not the square of the norm.
        await feeder.feed(range(4), 0, rewards={(0, 0): 1e30})
        done = (await feeder.event("step_done")).step_done
        assert done.figures["mini_batches_not_applied"] == 1
        assert done.figures["wait_s"] < 2
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    (record,) = lines(config, "not_applied.jsonl")
    assert (record["step"], record["reason"]) == (1, "the gradient norm is inf")
    recorded = lines(config, "policy.jsonl")
    with service_process("learner", config, redis_url, "--resume"):
        await feeder.feed(range(4, 8), 1)
        await feeder.event("training_done")
        await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
    assert lines(config, "policy.jsonl")[:2] == recorded
    assert lines(config, "not_applied.jsonl") == [record]


async def test_three_in_a_row_end_the_run_with_their_reason(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = run_of(tmp_path, algorithm={"adv_estimator": "reinforce", "num_mini_batches": 4})
    feeder = LearnerFeed(redis, keys)
    with service_process("learner", config, redis_url) as process:
        await registered(process, redis, keys, "learner")
        await feeder.feed(range(4), 0, rewards={(g, n): 1e30 for g in range(4) for n in range(4)})
        finished = (await feeder.event("finished")).finished
        assert (
            finished.end == RUN_END_FAILED
            and "3 mini-batches in a row were not applied; of the last one the gradient" in finished.reason
        )
        assert await asyncio.to_thread(wait_exit, process, 20) == 0


async def test_weights_that_are_not_finite_end_the_run_unpublished_and_a_lower_rate_goes_on(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    """A version is on record, or has been seen by anybody, only when all its weights are finite numbers."""
    algorithm = {"pg_clip_low": 1.0, "pg_clip_high": 100.0, "num_mini_batches": 1}
    run = {"total_steps": 1}
    # More than float32 holds.
    config = run_of(tmp_path, algorithm=algorithm, run=run, learner={"learning_rate": 1e39})
    feeder = LearnerFeed(redis, keys)
    with service_process("learner", config, redis_url) as process:
        await registered(process, redis, keys, "learner")
        await feeder.feed(range(4), 0)
        finished = (await feeder.event("finished")).finished
        assert finished.end == RUN_END_FAILED and "version 1 is not published" in finished.reason
        assert await asyncio.to_thread(wait_exit, process, 20) == 0
    assert [line["version"] for line in lines(config, "policy.jsonl")] == [0]
    assert not (config.run_dir / "export").exists() and not list((config.run_dir / "checkpoints").iterdir())
    config = run_of(tmp_path, algorithm=algorithm, run=run)
    with service_process("learner", config, redis_url, "--resume") as process:
        await feeder.event("training_done")
        # Its end waits for a version to be live, and for no generator that can never have it: this one has two tensors.
        async with generator(config, redis_url) as other:
            finished = (await feeder.event("finished", num=2)).finished
            assert finished.end == RUN_END_FAILED
            assert f"no generator takes the policy (generation-0 ({other.address}): INVALID_ARG" in finished.reason
            assert "sender and receiver hold different models). Correct the cause and resume" in finished.reason
            assert await asyncio.to_thread(wait_exit, process, 20) == 0
    assert [line["version"] for line in lines(config, "policy.jsonl")] == [0, 1]
    assert (config.run_dir / "export" / "config.json").is_file()
