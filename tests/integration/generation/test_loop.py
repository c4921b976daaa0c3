"""Generation loops on a real Redis with a stand-in engine: one without the weights leaves its tasks to others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from gspo.common.streams.inbox import append
from gspo.common.streams.keys import Keys
from gspo.generation import loop as loop_module
from gspo.generation.loop import GenerationLoop
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto.rollout_pb2 import GroupTask, Prompt, Rollout
from tests.support.push_peers import StandInEngine, run_config, service_of
from tests.support.service_process import make_run
from tests.support.typed.redis_entries import payloads

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]
NUM_GROUPS = 6


class StandInDriver:
    """Answers at once."""

    def __init__(self, engine: StandInEngine) -> None:
        self._engine = engine

    async def drive(self, rollout: InFlightRollout, segment_tokens: int | None) -> Rollout:
        return Rollout(schema=1, group=rollout.task.group, number=rollout.number, version=[self._engine.version])


def task(group: int, min_version: int) -> bytes:
    prompt = Prompt(token_ids=[1])
    return GroupTask(
        schema=1, group=group, attempt=1, num_rollouts=4, prompt=prompt, min_version=min_version
    ).SerializeToString()


async def test_a_generator_without_the_weights_leaves_its_tasks_to_others_until_it_has_them(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_WEIGHTS_PATIENCE_S", 0.2)
    config = run_config(tmp_path, make_run)
    services = [service_of(f"generation-{n}", config, redis_url) for n in range(2)]
    engines: list[Any] = [StandInEngine(), StandInEngine()]
    old, new = (
        GenerationLoop(service, engine, cast(Any, StandInDriver(engine)))
        for service, engine in zip(services, engines, strict=True)
    )
    working = [asyncio.create_task(old.run())]
    await redis.hset(keys.open, mapping={str(group): "{}" for group in range(NUM_GROUPS)})
    # The last one is of a group that was never issued: it is not put back.
    await append(redis, keys.prompts, [*(task(group, 1) for group in range(NUM_GROUPS)), task(99, 2**62)])
    # Alone, it takes them, and puts them back: no lease is left.
    while services[0].activity.detail != "newer than version 0" or await num_leased(redis, keys):
        await asyncio.sleep(0.02)
    assert (await redis.xlen(keys.prompts), old.num_running) == (NUM_GROUPS, 0)

    engines[1].version = 1
    working.append(asyncio.create_task(new.run()))
    await rollouts(redis, keys, 4 * NUM_GROUPS)

    engines[0].version = 1
    old.weights_changed()
    services[1].stopping.set()
    await working[1]
    await append(redis, keys.prompts, [task(group, 1) for group in range(10, 12)])
    await rollouts(redis, keys, 8)
    services[0].stopping.set()
    await working[0]
    for service in services:
        await service.redis.aclose()


async def num_leased(redis: Redis, keys: Keys) -> int:
    return int((await redis.xpending(keys.prompts, "generation"))["pending"])


async def rollouts(redis: Redis, keys: Keys, num: int) -> None:
    """Wait for so many rollouts under version 1, each once, and remove them."""
    while await redis.xlen(keys.rollouts) < num:
        await asyncio.sleep(0.02)
    results = [Rollout.FromString(payload) for payload in await payloads(redis, keys.rollouts)]
    assert len({(rollout.group, rollout.number) for rollout in results}) == len(results) == num
    assert {version for rollout in results for version in rollout.version} == {1}
    await redis.delete(keys.rollouts)
    while await redis.xlen(keys.prompts):
        await asyncio.sleep(0.02)
