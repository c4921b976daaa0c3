"""A learner that still recovers accepts no call, pushes no version and takes no rollout.

Real learner, Redis, gRPC and generators' servicers; the training step is simulated, so that a test can stop it.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from benchmarks.simulated.settings import Settings
from benchmarks.simulated.trainer import SimulatedTrainer
from gspo.common.config.schema import Config
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import Keys
from gspo.learner.app import run_learner
from gspo.learner.assembly.rows import Row, row_from_scored
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.training.trainer_api import TrainResult
from gspo_proto.generation_pb2 import PushResult
from gspo_proto.rollout_pb2 import Scored
from tests.support.push_peers import generator, service_of
from tests.support.training.learner_feed import NUM_ROLLOUTS, LearnerFeed, run_of, scored

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]


class StoppedTrainer(SimulatedTrainer):
    """Its first step, which is a replay, waits for the test."""

    def __init__(self, config: Config, folder: Path, run_dir: Path) -> None:
        super().__init__(config, folder, run_dir, Settings(time_scale=0))
        self.replaying, self.may_go_on = threading.Event(), threading.Event()

    def train(self, step: int, *arguments: Any, **named: Any) -> TrainResult:
        self.replaying.set()
        assert self.may_go_on.wait(30.0)
        return super().train(step, *arguments, **named)


def rows_of(groups: range, step: int) -> list[Row]:
    entries = [Scored.FromString(scored(group, number, 0)) for group in groups for number in range(NUM_ROLLOUTS)]
    return [replace(row_from_scored(entry.rollout), step=step) for entry in entries]


async def test_no_call_is_served_before_the_replay_is_done(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = run_of(tmp_path)
    with RunDir(config.run_dir) as run_dir:
        run_dir.write_step(1, rows_of(range(4), 1))
    model = Path(config.model.path)
    maker = StoppedTrainer(config, model, config.run_dir)
    feeder, service = LearnerFeed(redis, keys), service_of("learner-0", config, redis_url)

    async def learner() -> Instance:
        while not (instances := await list_instances(redis, keys, "learner")):
            await asyncio.sleep(0.01)
        return instances[0]

    async with generator(config, redis_url) as serving:
        serving.answer = PushResult()  # it has another model, and takes nothing
        await feeder.feed(range(4, 8), 0)
        running = asyncio.create_task(run_learner(service, lambda *_: maker))
        assert await asyncio.to_thread(maker.replaying.wait, 30.0)
        assert (service.activity.what, (await learner()).grpc) == ("replaying", "")
        assert service.problems
        assert [group["consumers"] for group in await redis.xinfo_groups(keys.scored)] == [0], "a rollout was taken"
        assert serving.headers == []

        maker.may_go_on.set()
        # The waiting rollouts are trained now, and the first push is of the replayed version or a later one.
        await feeder.event("step_done")
        while not serving.headers:
            await asyncio.sleep(0.01)
        assert serving.headers[0].version >= 1
        assert (await learner()).grpc
        service.stopping.set()
        await running
