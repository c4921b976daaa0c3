"""Sessions of generation loops on a real Redis, if a task is taken away or handed on in the midst of a conversation.

The engine is scripted: it says a line after a while.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest
from redis.asyncio import Redis

from gspo.common.config.reward import EnvironmentConfig
from gspo.common.config.schema import Config
from gspo.common.service.app import Service
from gspo.common.streams.inbox import append
from gspo.common.streams.keys import GENERATION, Keys
from gspo.environments.environment import Environment
from gspo.generation.engine.api import EngineLike
from gspo.generation.loop import GenerationLoop
from gspo_proto.rollout_pb2 import OUTCOME_ENVIRONMENT_DONE, Rollout
from tests.support.environments.game_server import EnvironmentServer, environment_server
from tests.support.environments.scripted_game import LINES, LinesEngine, driver_of, in_flight_of, on_server
from tests.support.push_peers import service_of
from tests.support.service_process import make_run
from tests.support.typed.redis_entries import payloads, stream_entries

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]
NUM_ROLLOUTS, LEASE_S = 4, 0.6


@pytest.fixture
def server() -> Iterator[EnvironmentServer]:
    with environment_server() as running:
        yield running


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_run(tmp_path, tmp_path, services={"lease_s": LEASE_S}, run={"drain_timeout_s": 0.4, "total_steps": 1})


def environment_of(server: EnvironmentServer) -> EnvironmentConfig:
    return EnvironmentConfig(url=server.url, name="game")


def loop_of(service: Service, environments: Mapping[str, Environment], turn_s: float) -> GenerationLoop:
    engine = LinesEngine(turn_s=turn_s)
    return GenerationLoop(service, cast("EngineLike", engine), driver_of(environments, engine))


async def begin(redis: Redis, keys: Keys, server: EnvironmentServer) -> None:
    """Issue a group, and wait until each of its rollouts has a session."""
    task = in_flight_of().task
    task.schema, task.group, task.attempt, task.num_rollouts = 1, 5, 1, NUM_ROLLOUTS
    await redis.hset(keys.open, "5", "{}")
    await append(redis, keys.prompts, [task.SerializeToString()])
    while await asyncio.to_thread(server.count) < NUM_ROLLOUTS:
        await asyncio.sleep(0.02)


async def test_a_task_that_is_taken_back_has_its_sessions_closed(
    redis: Redis, keys: Keys, redis_url: str, config: Config, server: EnvironmentServer
) -> None:
    service = service_of("generation-0", config, redis_url)
    async with on_server(environment_of(server)) as remotes:
        working = asyncio.create_task(loop_of(service, remotes, turn_s=30.0).run())
        await begin(redis, keys, server)
        for entry, _ in await stream_entries(redis, keys.prompts):
            await redis.xack(keys.prompts, GENERATION, entry)
            await redis.xdel(keys.prompts, entry)
        async with asyncio.timeout(15):
            while await asyncio.to_thread(server.count):
                await asyncio.sleep(0.05)
        assert not working.done(), "the generator goes on with other tasks"
        service.stopping.set()
        await working
    await service.redis.aclose()


async def test_a_drained_generator_hands_its_sessions_on(
    redis: Redis, keys: Keys, redis_url: str, config: Config, server: EnvironmentServer
) -> None:
    services = [service_of(f"generation-{number}", config, redis_url) for number in range(2)]
    async with on_server(environment_of(server)) as first, on_server(environment_of(server)) as second:
        working = asyncio.create_task(loop_of(services[0], first, turn_s=1.5).run())
        await begin(redis, keys, server)
        sessions = set(server.sessions())
        services[0].stopping.set()
        await working
        working = asyncio.create_task(loop_of(services[1], second, turn_s=1.0).run())
        while await redis.xlen(keys.rollouts) < NUM_ROLLOUTS:
            await asyncio.sleep(0.02)
        services[1].stopping.set()
        await working
    rollouts = [Rollout.FromString(payload) for payload in await payloads(redis, keys.rollouts)]
    assert {json.loads(rollout.state_json)["episode_id"] for rollout in rollouts} == sessions
    assert {(rollout.outcome, rollout.num_turns) for rollout in rollouts} == {(OUTCOME_ENVIRONMENT_DONE, len(LINES))}
    assert await asyncio.to_thread(server.count) == 0
    for service in services:
        await service.redis.aclose()
