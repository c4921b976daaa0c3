"""Many agents that play the rollouts of a run while generators, gateways and workers are lost, and weights change.

Losses are of one process each, as a kill makes them: connections break, and nothing is written to Redis any more.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from gspo.agents.relay import Relay, Streams
from gspo.agents.worker import AgentWorker, connections_of
from gspo.common.service.app import Service
from tests.support.agents.restless_agent import RestlessAgent
from tests.support.push_peers import service_of
from tests.support.started_gateway import Generator, served, started_generator

AGENTS = 50


@dataclass
class Processes:
    """Processes that can be lost.

    Attributes:
        url: That of a balancer, which passes each connection on to a gateway.
        num_lost: By kind.
    """

    url: str
    num_lost: dict[str, int]
    _lose: dict[str, Callable[[], Awaitable[None]]]

    async def lose(self, kind: str) -> None:
        """Lose one of a kind: generator, gateway or worker."""
        self.num_lost[kind] += 1
        await self._lose[kind]()


@asynccontextmanager
async def lossy_processes(
    service: Service, shared: Any, redis_url: str, agent: RestlessAgent, num_agents: int, num_gateways: int
) -> AsyncIterator[Processes]:
    """Generators and workers of a run, two of each, which `Processes.lose` ends and replaces; and gateways.

    Args:
        num_gateways: All start at once, since the start of one keeps this process busy, and those that are lost are not
            replaced.
    """
    async with AsyncExitStack() as stack:
        numbers, drawn = itertools.count(1), random.Random(0)  # noqa: S311 - which gateway is called
        gateways: list[tuple[AsyncExitStack, Service, str]] = []
        generators: list[Generator] = []
        workers: list[tuple[str, asyncio.Task[None]]] = []

        async def dial() -> Streams:
            host, port = drawn.choice(gateways)[2].rsplit(":", 1)
            return await asyncio.open_connection(host, int(port))

        async def add_gateway() -> None:
            own = await stack.enter_async_context(AsyncExitStack())
            of = service_of(f"gateway-{next(numbers)}", service.config, redis_url)
            gateways.append((own, of, await own.enter_async_context(served(of))))

        async def add_generator() -> None:
            name = f"generation-{next(numbers)}"
            generators.append(await stack.enter_async_context(started_generator(service, shared, name)))

        def add_worker() -> None:
            name = f"worker-{next(numbers)}"
            worker = AgentWorker(agent, url, service.options.token, num_agents // 2, name=name)
            workers.append((name, asyncio.create_task(worker.run())))

        async def lose_gateway() -> None:
            own, of, _ = gateways.pop(0)
            _cut_off(of)
            await own.aclose()

        async def lose_generator() -> None:
            await generators.pop(0).lose()
            await add_generator()

        async def lose_worker() -> None:
            name, lost = workers.pop(0)
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
            await _end_leases(service, name)
            add_worker()

        for _ in range(num_gateways):
            await add_gateway()
        for _ in range(2):
            await add_generator()
        url = await stack.enter_async_context(balancer(dial))
        for _ in range(2):
            add_worker()
        lose: dict[str, Callable[[], Awaitable[None]]] = {
            "gateway": lose_gateway,
            "generator": lose_generator,
            "worker": lose_worker,
        }
        yield Processes(url, dict.fromkeys(lose, 0), lose)
        for _, worker in workers:
            worker.cancel()
        await asyncio.gather(*(worker for _, worker in workers), return_exceptions=True)


@asynccontextmanager
async def balancer(dial: Callable[[], Awaitable[Streams]]) -> AsyncIterator[str]:
    """An address that passes each connection on to a gateway which `dial` reaches, as a load balancer does."""
    listening = socket.create_server(("127.0.0.1", 0))
    async with Relay(listening, "gateway", dial, asyncio.Semaphore(connections_of(AGENTS))):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


async def _end_leases(service: Service, worker: str) -> None:
    """End the leases of a lost worker now, as their time would: nothing here depends on a clock."""
    async for name in service.redis.scan_iter(service.keys.key("agent:*")):
        if await service.redis.hget(name, "worker") == worker.encode():
            await service.redis.hset(name, "until", 0.0)


def _cut_off(service: Service) -> None:
    """Nothing that a lost gateway still does reaches Redis."""

    async def refuse(*_args: Any, **_options: Any) -> Any:
        raise RedisConnectionError("this gateway is lost")

    service.redis.execute_command = refuse  # type: ignore[method-assign]
    service.redis.pipeline = _no_pipeline  # type: ignore[method-assign]


def _no_pipeline(*_args: Any, **_options: Any) -> Any:
    raise RedisConnectionError("this gateway is lost")
