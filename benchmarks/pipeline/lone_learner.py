"""A learner without a trainer beside many generators without engines, for the section `generators`.

Real are Redis, the publisher and the intake. The scored rollouts are written before.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import CACHE
from benchmarks.harness.child_process import MeasurementError, started
from benchmarks.harness.section import Record
from benchmarks.harness.services import running_services
from benchmarks.pipeline.rollout_rate import GROUP_SIZE, GROUPS, TOKENS, example_rollout
from gspo.common.config.loading import read_config
from gspo.common.config.schema import Config
from gspo.common.service.app import Service
from gspo.common.service.options import Options
from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.events import Events
from gspo.common.streams.inbox import append
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import GENERATION, LEARNER
from gspo.common.tasks import task_group
from gspo.learner.assembly.assembler import Assembler
from gspo.learner.assembly.settlements import Settlements
from gspo.learner.intake import Intake
from gspo.learner.push.policy_weights import weights_from
from gspo.learner.push.publisher import Publisher
from gspo.learner.run_end import RunEndCondition
from gspo.learner.storage.run_directory import RunDir
from gspo_core.advantage import RunningMoments
from gspo_proto.rollout_pb2 import Rollout, Score, Scored, ScoredRollout

_VERSIONS, _LOOKS_S, _START_S = 6, 10.0, 120.0


class CountedPublisher(Publisher):
    """Notes the processor time of each look at the generators; it looks again at once while `hurries`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hurries, self.looks_s, self._began_s = False, list[float](), 0.0

    async def _refresh_replicas(self) -> None:
        if self.hurries:
            self.wake()
            self.looks_s.append(time.process_time() - self._began_s)
        self._began_s = time.process_time()
        await super()._refresh_replicas()


def costs(config: str, num_generators: int, num_batches: int) -> Record:
    """The costs of a learner in this process."""
    return asyncio.run(_run(read_config(Path(config)), num_generators, num_batches))


async def _run(config: Config, num_generators: int, num_batches: int) -> Record:
    async with running_services(config) as services:
        words = ("benchmarks.pipeline.stand_ins", str(config.run_dir), services.redis_url, str(num_generators))
        with started([sys.executable, "-m", *words], CACHE / "stand_ins.log"):
            async with asyncio.timeout(_START_S):
                while len(await list_instances(services.redis, services.keys, GENERATION)) < num_generators:
                    await asyncio.sleep(0.2)
            options = Options(LEARNER, config.run_dir, services.redis_url, "learner-0", "", 0, 0, False, config)
            learner = Service(options)
            publisher = CountedPublisher(learner, 1, _ignore)
            async with task_group(publisher.run()):
                updates = await _updates(publisher)
                publisher.hurries = True
                await asyncio.sleep(_LOOKS_S)
                publisher.hurries = False
                intake = await _intake(learner, publisher, num_batches)
            await learner.close()
    return {"number": num_generators, "tokens": TOKENS, **updates, "look_s": min(publisher.looks_s[1:]), **intake}


async def _ignore(*_: object) -> None: ...


async def _updates(publisher: Publisher) -> Record:
    """The first policy to all generators, and versions that are a few changes to the one before."""
    weights, used_s = torch.zeros(1000, 1000, dtype=torch.bfloat16), []
    for version in range(_VERSIONS):
        weights[version] += 1.0
        policy = weights_from(version, {"weights": weights.clone()})
        began_s, deadline = time.process_time(), time.monotonic() + _START_S
        publisher.publish(policy)
        while {(it["state"], it["version"]) for it in publisher.describe()} != {("current", version)}:
            await asyncio.sleep(0.05)
            if time.monotonic() > deadline:
                raise MeasurementError(f"not every generator has version {version} after {_START_S:g} s")
        used_s.append(time.process_time() - began_s)
    return {"parameters": weights.numel(), "first_s": used_s[0], "changes_s": min(used_s[1:])}


async def _intake(learner: Service, publisher: Publisher, num_batches: int) -> Record:
    """The time of whole batches, from rollouts in Redis to their acknowledgement."""
    config, redis, keys = learner.config, learner.redis, learner.keys
    answer = example_rollout(TOKENS)
    for group in range(num_batches * GROUPS):
        await redis.hset(keys.open, str(group), '{"min_version": 0}')
        await append(redis, keys.scored, [_scored(answer, group, number) for number in range(GROUP_SIZE)])
    assembler = Assembler(
        config.algorithm, config.staleness, seed=0, settlements=Settlements(), moments=RunningMoments()
    )
    events, run_dir = Events(redis, keys, "learner-0"), RunDir(config.run_dir / "intake")
    intake = Intake(learner, run_dir, assembler, publisher, RunEndCondition(config.run), events)
    began_s, num_rollouts = time.process_time(), 0
    async with task_group(intake.run()):
        for _ in range(num_batches):
            batch = await intake.next_batch(0, lambda: False)
            assert batch is not None
            await intake.acknowledge_trained(batch.rows)
            num_rollouts += len(batch.rows)
            await redis.hdel(keys.open, *map(str, batch.groups))
    used_s = time.process_time() - began_s
    run_dir.close()
    return {"rollouts": num_rollouts, "intake_s": used_s}


def _scored(answer: Rollout, group: int, number: int) -> bytes:
    answer.group, answer.number = group, number
    return Scored(
        schema=SCHEMA, rollout=ScoredRollout(rollout=answer, score=Score(reward=number % 2))
    ).SerializeToString()
