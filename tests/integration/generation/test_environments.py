"""Steps on reward replicas that hang, end, refuse or are missing: each is answered, or fails with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from gspo.common.network.grpc_server import GrpcApi, GrpcServer
from gspo.common.streams.instances import Instance, Registration
from gspo.common.streams.keys import Keys
from gspo.common.telemetry.activity import Activity
from gspo.environments import function_environment
from gspo.environments.function_environment import FunctionEnvironment
from gspo_proto import reward_pb2_grpc
from gspo_proto.reward_pb2 import EnvironmentReply, StepRequest
from tests.support.push_peers import run_config, service_of
from tests.support.service_process import make_run

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]
REQUEST = StepRequest(environment="game", state_json="1", action="a")


class Replica(reward_pb2_grpc.RewardServicer):
    """Answers steps at once, after a while, or by a refusal; no other calls."""

    def __init__(self, name: str) -> None:
        self.name, self.num_steps, self.hangs = name, 0, False
        self.refuses: tuple[grpc.StatusCode, str] | None = None

    async def StepEnvironment(self, request: StepRequest, context: Any) -> EnvironmentReply:
        self.num_steps += 1
        if self.refuses:
            await context.abort(*self.refuses)
        if self.hangs:
            await asyncio.sleep(600)
        return EnvironmentReply(state_json=request.state_json, version=self.name)


def make_replica(name: str) -> Replica:
    return Replica(name)  # type: ignore[abstract]


@asynccontextmanager
async def registered(redis: Redis, keys: Keys, replica: Replica) -> AsyncIterator[asyncio.Task[None]]:
    """A replica that serves; its heartbeat, which is yielded, ends with the block."""
    server = GrpcServer(
        GrpcApi("gspo.Reward", lambda server: reward_pb2_grpc.add_RewardServicer_to_server(replica, server)),
        host="127.0.0.1",
        port=0,
        token="",
    )
    await server.start()
    instance = Instance("reward", replica.name, grpc=server.address)
    registration = Registration(redis, keys, instance, Activity("reward"), dict)
    beating = asyncio.create_task(registration.run())
    while not await redis.exists(keys.instance("reward", instance.uid)):
        await asyncio.sleep(0.01)
    try:
        yield beating
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await server.stop(0)


@pytest_asyncio.fixture(loop_scope="function")
async def environments(redis_url: str, tmp_path: Path) -> AsyncIterator[FunctionEnvironment]:
    service = service_of("generation-0", run_config(tmp_path, make_run), redis_url)
    yield FunctionEnvironment(service)
    await service.close()


async def test_a_step_goes_to_another_replica_when_its_own_is_gone(
    redis: Redis, keys: Keys, environments: FunctionEnvironment
) -> None:
    hanging, other = make_replica("a"), make_replica("b")
    hanging.hangs = True
    following = asyncio.create_task(environments.run())
    async with registered(redis, keys, hanging):
        step = asyncio.create_task(environments.step(REQUEST, 1.0))
        while not hanging.num_steps:
            await asyncio.sleep(0.01)
    # Its heartbeat has ended with its server, and there is no other: the step waits for the next replica.
    async with registered(redis, keys, other):
        assert (await step).version == "b"
    assert (hanging.num_steps, other.num_steps) == (1, 1)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_step_of_a_replica_that_hangs_without_a_heartbeat_is_repeated_elsewhere(
    redis: Redis, keys: Keys, environments: FunctionEnvironment
) -> None:
    hanging, other = make_replica("a"), make_replica("b")
    hanging.hangs = True
    async with registered(redis, keys, hanging) as beating:
        step = asyncio.create_task(environments.step(REQUEST, 1.0))
        while not hanging.num_steps:
            await asyncio.sleep(0.01)
        async with registered(redis, keys, other):
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await environments._replicas.refresh()
            assert (await step).version == "b"


async def test_calls_are_spread_over_the_replicas(redis: Redis, keys: Keys, environments: FunctionEnvironment) -> None:
    replicas = [make_replica("a"), make_replica("b")]
    async with registered(redis, keys, replicas[0]), registered(redis, keys, replicas[1]):
        await asyncio.gather(*(environments.step(REQUEST, 1.0) for _ in range(20)))
    assert [replica.num_steps for replica in replicas] == [10, 10]


async def test_a_refusal_that_holds_on_every_replica_fails_at_once(
    redis: Redis, keys: Keys, environments: FunctionEnvironment
) -> None:
    replica = make_replica("a")
    replica.refuses = (grpc.StatusCode.NOT_FOUND, "it was never submitted")
    async with registered(redis, keys, replica):
        failure = (await environments.step(REQUEST, 1.0)).failure
    assert (failure.kind, failure.text, replica.num_steps) == ("unknown_function", "it was never submitted", 1)


async def test_a_step_that_no_replica_answers_fails_with_the_reason(
    redis: Redis, keys: Keys, environments: FunctionEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_environment, "REACH_TIMEOUT_S", 0.3)
    failure = (await environments.step(REQUEST, 0.1)).failure
    assert failure.kind == "unreachable"
    assert failure.text == "no reward service answered a step in 0.3 s: none is registered"
    replica = make_replica("a")
    replica.refuses = (grpc.StatusCode.UNAVAILABLE, "overloaded")
    # Enough for a connection and several refusals.
    monkeypatch.setattr(function_environment, "REACH_TIMEOUT_S", 2.0)
    async with registered(redis, keys, replica):
        failure = (await environments.step(REQUEST, 0.1)).failure
    assert failure.text.endswith("a said UNAVAILABLE: overloaded")
    assert replica.num_steps > 1
