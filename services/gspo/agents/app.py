"""The service of a run's own agents: leases rollouts at the gateway, and plays each in a sandbox.

waits for: rollouts at the gateway, the agents. It ends with the run, and every process of an agent with it.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

from gspo.agents.agent_pool import AgentPool
from gspo.agents.relay import Relay, dial_gateway
from gspo.agents.worker import AgentWorker, connections_of
from gspo.common.service.app import App, Service, run_app
from gspo.common.telemetry import metrics
from gspo.reward.sandbox.levels import find_agent_level

log = structlog.get_logger()
_SHOW_EVERY_S = 1.0


async def run_agents(service: Service) -> None:
    """Play rollouts until the run ends or a signal comes."""
    await run_app(service, startup, ends_with_run=True)


@asynccontextmanager
async def startup(service: Service) -> AsyncIterator[App]:
    """Find the level of confinement, and start the sandboxes."""
    config = service.config
    level = await find_agent_level(config.reward.sandbox_minimum)
    service.facts["sandbox"] = str(level)
    log.info("sandbox", confinement=level.name, parts=level.parts, lacks=level.lacks)
    gateway, listening = dial_gateway(service), socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    # Of the workers' own calls: agents have relays of their own.
    relay = Relay(listening, "gateway", gateway, asyncio.Semaphore(connections_of(config.agent.workers)))
    async with relay, AgentPool(config.agent, level, gateway) as pool:
        service.activity.set("busy", "starting the agents")
        await pool.start_all()
        worker = AgentWorker(pool.play, url, service.options.token, config.agent.workers, name=service.options.name)

        async def main() -> None:
            await _play_until_stopping(service, worker)

        async def show() -> None:
            await _show(service, pool)

        yield App(main, background={"activity": show})


async def _play_until_stopping(service: Service, worker: AgentWorker) -> None:
    """Rollouts that are still played at the end go to other workers when their leases end."""
    playing = asyncio.create_task(worker.run())
    try:
        await _first_of(playing, service.stopping)
        if playing.done():
            playing.result()  # the gateway is away, or says that the run has ended
            await service.stopping.wait()
        elif not service.run_ended.is_set():
            worker.drain()
            log.info("draining", detail=f"rollouts have run.drain_timeout_s {service.config.run.drain_timeout_s:g} s")
            await _first_of(playing, service.run_ended, service.config.run.drain_timeout_s)
    finally:
        playing.cancel()
        with suppress(asyncio.CancelledError):
            await playing


async def _first_of(playing: asyncio.Task[None], event: asyncio.Event, timeout_s: float | None = None) -> None:
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({playing, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _show(service: Service, pool: AgentPool) -> None:
    while True:
        number = pool.num_playing
        metrics.AGENT_SANDBOXES_PLAYING.set(number)
        if number:
            service.activity.set("busy", "playing", f"{number} rollouts")
        else:
            service.activity.set("waiting", "rollouts", "none is open")
        await asyncio.sleep(_SHOW_EVERY_S)
