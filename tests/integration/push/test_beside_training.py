"""Versions and checkpoints are made while the next step trains: order on the disk, a kill in between, errors.

Real learner, Redis, gRPC and run directory; the training step is simulated, and the test stops the making.
"""

from __future__ import annotations

import asyncio
import errno
import math
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from benchmarks.simulated import trainer as simulated_trainer
from benchmarks.simulated.settings import Settings
from benchmarks.simulated.trainer import SimulatedTrainer
from gspo.common.config.schema import Config
from gspo.common.streams.events import Events
from gspo.common.streams.keys import Keys
from gspo.common.telemetry.activity import Activity
from gspo.learner.app import run_learner
from gspo.learner.push import copy_memory
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from gspo.learner.recovery import recover
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.training.trainer_api import TrainResult, UpdateNotApplied, WriteCheckpoint
from gspo_proto.generation_pb2 import PushResult
from gspo_proto.rollout_pb2 import RUN_END_FAILED, Event, Finished
from tests.support.push_peers import generator, service_of
from tests.support.training.learner_feed import LearnerFeed, lines, run_of

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]


class InstantTrainer(SimulatedTrainer):
    """A step takes no time.

    Attributes:
        begun: The steps that have begun.
        spoiled: The version whose weights are not finite; every update after it is not applied.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, Path(config.model.path), config.run_dir, Settings(time_scale=0))
        self.begun: list[int] = []
        self.spoiled: int | None = None

    def train(self, step: int, *arguments: Any, **named: Any) -> TrainResult:
        self.begun.append(step)
        trained = super().train(step, *arguments, **named)
        if self.spoiled is None or step <= self.spoiled:
            return trained
        return TrainResult(trained.metrics, (UpdateNotApplied(0, 0, "the loss is nan"),))

    def policy(self) -> dict[str, Any]:
        tensors = super().policy()
        if self.begun and self.begun[-1] == self.spoiled:
            next(iter(tensors.values()))[0] = math.inf
        return tensors


class StoppedMaking:
    """Stands before `weights_from`: version 1 waits for the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits, self.may_go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(simulated_trainer, "weights_from", self)

    def __call__(self, version: int, tensors: dict[str, Any], recorded: str = "") -> PolicyWeights:
        if version == 1:
            self.waits.set()
            assert self.may_go_on.wait(30.0)
        return weights_from(version, tensors, recorded)


@asynccontextmanager
async def learner(config: Config, redis_url: str, trainer: InstantTrainer) -> AsyncIterator[asyncio.Task[None]]:
    service = service_of("learner-0", config, redis_url)
    running = asyncio.create_task(run_learner(service, lambda *_: trainer))
    try:
        yield running
    finally:
        service.stopping.set()
        await running


async def until_begun(trainer: InstantTrainer, step: int) -> None:
    async with asyncio.timeout(25):
        while step not in trainer.begun:
            await asyncio.sleep(0.01)


async def test_the_next_step_trains_while_a_version_is_made_and_a_kill_in_between_costs_nothing(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(tmp_path, run={"total_steps": 2})
    feeder, trainer, making = LearnerFeed(redis, keys), InstantTrainer(config), StoppedMaking(monkeypatch)
    async with generator(config, redis_url) as serving, learner(config, redis_url, trainer):
        serving.answer = PushResult()  # it has another model, and takes nothing
        await feeder.feed(range(8), 0)
        await until_begun(trainer, 2)
        assert making.waits.is_set()
        assert [line["version"] for line in lines(config, "policy.jsonl")] == [0]
        assert {header.version for header in serving.headers} == {0}
        # As a kill would leave it: step 2 is logged, and version 1 is not on record.
        killed = shutil.copytree(config.run_dir, tmp_path / "killed")
        await asyncio.sleep(0.3)
        making.may_go_on.set()
        done = [(await feeder.event("step_done", num=num)).step_done for num in (1, 2)]
        await feeder.event("training_done")
        await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
    assert [line["version"] for line in lines(config, "policy.jsonl")] == [0, 1, 2]
    assert [line["step"] for line in lines(config, "metrics.jsonl")] == [1, 2]
    assert done[0].figures["version_beside_s"] > 0
    assert done[0].figures["publish_s"] + done[0].figures["train_s"] < done[0].figures["version_beside_s"]
    # The second step's training was over before version 1 was made, and waited for it.
    assert done[1].figures["train_s"] < 0.3 < done[1].figures["publish_s"]
    with RunDir(killed) as run_dir:
        assert [path.name for path in sorted((killed / "log").glob("*.parquet"))] == [
            "step-000001.parquet",
            "step-000002.parquet",
        ]
        resumed = InstantTrainer(config)
        recover(config, Path(config.model.path), run_dir, Activity("learner"), lambda *_: resumed)
        digests = [version.digest for _, version in sorted(run_dir.versions.items())]
    assert digests == [line["digest"] for line in lines(config, "policy.jsonl")]


async def test_without_memory_for_it_training_waits_for_the_version_and_the_log_says_so(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(tmp_path, run={"total_steps": 2})
    feeder, trainer, making = LearnerFeed(redis, keys), InstantTrainer(config), StoppedMaking(monkeypatch)
    monkeypatch.setattr(copy_memory, "free_memory", lambda: 1e6)
    with capture_logs() as logged:
        async with learner(config, redis_url, trainer):
            await feeder.feed(range(8), 0)
            assert await asyncio.to_thread(making.waits.wait, 10.0)
            await asyncio.sleep(0.3)
            assert trainer.begun == [1]
            making.may_go_on.set()
            done = [(await feeder.event("step_done", num=num)).step_done for num in (1, 2)]
            await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
    assert [step.figures["version_beside_s"] for step in done] == [0, 0]
    assert done[0].figures["publish_s"] > 0.3
    (line,) = [line for line in logged if line["event"] == "no_memory_for_next_version"]
    assert line["effect"] == "training waits while a version is made"


@pytest.mark.parametrize("num_groups", [8, 4])
async def test_a_version_that_is_not_finite_ends_the_run_before_anything_of_the_next_step_is_on_record(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_groups: int
) -> None:
    """While the next step trains, and while the learner waits for rollouts."""
    config = run_of(tmp_path)
    feeder, trainer, making = LearnerFeed(redis, keys), InstantTrainer(config), StoppedMaking(monkeypatch)
    trainer.spoiled = 1
    async with learner(config, redis_url, trainer) as running:
        await feeder.feed(range(num_groups), 0)
        await until_begun(trainer, num_groups // 4)
        making.may_go_on.set()
        finished = (await feeder.event("finished", timeout_s=10)).finished
        await running
    assert finished.end == RUN_END_FAILED and finished.reason.startswith("version 1 is not published")
    assert [line["version"] for line in lines(config, "policy.jsonl")] == [0]
    assert lines(config, "not_applied.jsonl") == lines(config, "metrics.jsonl") == []


class WaitingWrites(InstantTrainer):
    """The files of checkpoints wait for the test.

    Attributes:
        errors: Raised by the writes, one each, before any file is written.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.may_write, self.errors = threading.Event(), list[Exception]()

    def begin_save(self, folder: Path, state: Mapping[str, Any]) -> WriteCheckpoint:
        write_own = super().begin_save(folder, state)

        def write(is_given_up: Callable[[], bool]) -> None:
            assert self.may_write.wait(30.0)
            if self.errors:
                raise self.errors.pop(0)
            write_own(is_given_up)

        return write


async def test_steps_train_while_a_checkpoint_is_written_and_it_counts_when_it_is_whole(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    """On a full disk it waits for space; meanwhile nothing is removed, and the next checkpoint waits for it."""
    run = {"total_steps": 3, "checkpoint_every": 1, "keep_checkpoints": 1, "keep_log_steps": 1}
    config = run_of(tmp_path, run=run)
    feeder, trainer = LearnerFeed(redis, keys), WaitingWrites(config)
    trainer.errors = [OSError(errno.ENOSPC, "No space left on device")]
    checkpoints = config.run_dir / "checkpoints"
    async with learner(config, redis_url, trainer):
        await feeder.feed(range(4), 0)
        await feeder.event("step_done")
        await feeder.feed(range(4, 12), 1)
        await feeder.event("step_done", num=2)
        await asyncio.sleep(0.3)
        assert trainer.begun == [1, 2], "the checkpoint of step 2 did not wait for that of step 1"
        assert [path.name for path in checkpoints.iterdir()] == ["step-000001.tmp"]
        killed = shutil.copytree(config.run_dir, tmp_path / "killed")
        trainer.may_write.set()
        await feeder.event("training_done")
        third = (await feeder.event("step_done", num=3)).step_done.figures
        done = [(await feeder.event("checkpoint_done", num=num)).checkpoint_done.step for num in (1, 2, 3)]
        await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
    assert done == [1, 2, 3] and [path.name for path in checkpoints.iterdir()] == ["step-000003"]
    assert [path.name for path in (config.run_dir / "log").glob("*.parquet")] == ["step-000003.parquet"]
    assert third["checkpoint_beside_s"] > third["checkpoint_s"] > 0.3
    with RunDir(killed) as run_dir:
        assert run_dir.checkpoints.all_steps() == [] and run_dir.steps_to_replay(after=0) == [1, 2]


async def test_an_error_of_the_write_beside_training_ends_the_learner(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    """It waits for rollouts when the error comes; the request that is open then is not answered."""
    config = run_of(tmp_path, run={"checkpoint_every": 1})
    feeder, trainer = LearnerFeed(redis, keys), WaitingWrites(config)
    trainer.errors = [OSError(errno.EIO, "Input/output error")]
    running = asyncio.create_task(run_learner(service_of("learner-0", config, redis_url), lambda *_: trainer))
    await feeder.feed(range(4), 0)
    await feeder.event("step_done")
    trainer.may_write.set()
    with pytest.raises((OSError, ExceptionGroup), match=r"Input/output error|unhandled errors"):
        await asyncio.wait_for(running, 20)
    with RunDir(config.run_dir) as run_dir:
        assert run_dir.checkpoints.all_steps() == [] and run_dir.steps_to_replay(after=0) == [1]


async def test_without_memory_for_its_copies_training_waits_for_a_checkpoint(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(tmp_path, run={"total_steps": 2, "checkpoint_every": 1})
    feeder, trainer = LearnerFeed(redis, keys), WaitingWrites(config)
    monkeypatch.setattr(copy_memory, "free_memory", lambda: 1e6)
    with capture_logs() as logged:
        async with learner(config, redis_url, trainer):
            await feeder.feed(range(4), 0)
            await feeder.feed(range(4, 8), 0)
            await feeder.event("training_done")
            second = (await feeder.event("step_done", num=2)).step_done.figures
            await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
    assert second["checkpoint_beside_s"] == 0 < second["checkpoint_s"]
    (line,) = [line for line in logged if line["event"] == "no_memory_for_checkpoint"]
    assert line["effect"] == "training waits while a checkpoint is written"
