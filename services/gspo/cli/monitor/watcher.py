"""Feeds a view: follows the run's events, reads heartbeats, asks who is ready.

Consumes: the events stream, members, /readyz of every process. Produces: the view, and lines for the screen.
It controls nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
from redis.asyncio import Redis

from gspo.cli.monitor.generators import GeneratorAlerts
from gspo.cli.monitor.view import ScreenLine, View
from gspo.cli.rundir import http_client
from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import Keys
from gspo.common.telemetry.activity import STARTING

POLL_S = 1.0
_READY_TIMEOUT_S = 2.0


class Watcher:
    """Watches one run.

    Args:
        say: Called with every line worth showing.
    """

    def __init__(self, redis: Redis, view: View, say: Callable[[ScreenLine], None]) -> None:
        self._redis, self._view, self._say = redis, view, say
        self._keys = Keys(view.config.name)
        self._events = Events(redis, self._keys, "cli")
        self._position = FROM_START
        self._news = GeneratorAlerts()

    async def forget_last_session(self) -> None:
        """Look past what an earlier session left: its end would end this one, and its addresses lead nowhere."""
        self._position = await self._events.newest()
        await self._redis.delete(self._keys.instances)

    async def follow(self) -> None:
        """Take events in until the run has finished."""
        async for event in self._events.follow(self._position):
            for line in self._view.apply(event):
                self._say(line)
            if self._view.finished is not None:
                return

    async def poll(self) -> None:
        """Refresh heartbeats and readiness, for ever."""
        async with http_client.client(self._view.config, timeout_s=_READY_TIMEOUT_S) as client:
            while True:
                await self._read_members()
                await asyncio.gather(*(self._ask_ready(client, name) for name in self._view.processes))
                self._enter_phase()
                await asyncio.sleep(POLL_S)

    async def until_started(self, timeout_s: float) -> None:
        """Wait until every process is ready.

        Raises:
            TimeoutError: Names those that are not, and why.
        """
        deadline = time.monotonic() + timeout_s
        while left := self._view.waiting_to_start:
            if time.monotonic() > deadline:
                why = "; ".join(f"{process.name}: {process.in_words()}" for process in left)
                raise TimeoutError(f"not ready after {timeout_s:g} s (run.start_timeout_s): {why}")
            await asyncio.sleep(0.2)

    async def _read_members(self) -> None:
        found = await list_instances(self._redis, self._keys)
        # The newest of a name last: one that was killed is remembered for a while beside its successor.
        newest = {instance.name: instance for instance in reversed(found)}
        for process in self._view.processes.values():
            # One that imports or loads sends no heartbeat meanwhile: until it is ready the last one says what it does.
            process.instance = newest.get(process.name, None if process.ready else process.instance)
        for line in self._news.lines(found):
            self._say(line)

    async def _ask_ready(self, client: httpx.AsyncClient, name: str) -> None:
        process = self._view.processes[name]
        if process.ready or process.instance is None or not process.instance.http:
            return
        try:
            reply = await client.get(f"{http_client.url(process.instance.http, self._view.config)}/readyz")
            process.ready = reply.status_code == httpx.codes.OK
            problems = {} if process.ready else reply.json().get("problems", {})
            # That it is starting is no problem, and what it does meanwhile is in its heartbeat.
            process.problem = "; ".join(str(text) for cause, text in problems.items() if cause != STARTING)
        except (httpx.TimeoutException, httpx.ConnectError):
            process.problem = ""  # it imports or loads, and answers nobody meanwhile
        except httpx.HTTPError as error:
            process.problem = f"/readyz cannot be read ({type(error).__name__})"

    def _enter_phase(self) -> None:
        view = self._view
        if view.phases.current != "start" or view.waiting_to_start:
            return
        waits_for_evaluation = bool(view.config.evaluation.files) and not view.evaluations
        view.phases.enter("evaluation_before" if waits_for_evaluation else "training")
        self._say(ScreenLine(f"all services are ready after {view.phases.wall_s['start']:.1f} s"))
