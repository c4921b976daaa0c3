"""Keeps a view current: follows the run's events, reads heartbeats, probes readiness, watches the free disk space.

Consumes: the events stream, heartbeats, /readyz of every process. Produces: the view, and lines for the screen.
It controls nothing.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from gspo.cli.monitor.view import ScreenLine, View
from gspo.cli.rundir.open_run import api_client, api_url
from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import Keys
from gspo.common.telemetry.activity import STARTING
from gspo.common.telemetry.step_time import duration

POLL_S = 1.0
_READY_TIMEOUT_S = 2.0
_LEAST_DISK_BYTES, _DISK_POLL_S = 1 << 20, 2.0
# A push that takes longer is worth a line.
_LONG_PUSH_S = 5.0
_OUT = "out"


class Watcher:
    """Watches one run.

    Args:
        say: Called with every line for the screen.
    """

    def __init__(self, redis: Redis, view: View, say: Callable[[ScreenLine], None]) -> None:
        self._redis, self._view, self._say = redis, view, say
        self._keys = Keys(view.config.name)
        self._events = Events(redis, self._keys, "cli")
        self._position = FROM_START
        self._alerts = GeneratorAlerts()

    async def forget_last_session(self) -> None:
        """Skip the events of an earlier session, whose end would end this one, and forget its processes."""
        self._position = await self._events.newest()
        await self._redis.delete(self._keys.instances, self._keys.gpu_engines)

    async def follow(self) -> None:
        """Apply events to the view until the run has finished."""
        async for event in self._events.follow(self._position):
            for line in self._view.apply(event):
                self._say(line)
            if self._view.finished is not None:
                return

    async def poll(self) -> None:
        """Refresh heartbeats and readiness without end."""
        async with api_client(self._view.config, timeout_s=_READY_TIMEOUT_S) as client:
            while True:
                await self._read_instances()
                await asyncio.gather(*(self._probe_readiness(client, name) for name in self._view.processes))
                self._enter_phase()
                await asyncio.sleep(POLL_S)

    async def until_started(self, timeout_s: float) -> None:
        """Wait until every process is ready.

        Raises:
            TimeoutError: Names the processes that are not ready, with the reasons.
        """
        deadline = time.monotonic() + timeout_s
        while self._view.waiting_to_start:
            if time.monotonic() > deadline:
                reasons = self._view.waited_for()
                raise TimeoutError(f"not ready after {timeout_s:g} s (run.start_timeout_s): {reasons}")
            await asyncio.sleep(0.2)

    async def _read_instances(self) -> None:
        instances = await list_instances(self._redis, self._keys)
        # The newest of a name comes last: a killed process is listed for a while beside its successor.
        newest = {instance.name: instance for instance in reversed(instances)}
        for process in self._view.processes.values():
            # An import or a load blocks the heartbeat: until the process is ready, its last heartbeat stays valid.
            process.instance = newest.get(process.name, None if process.ready else process.instance)
        for line in self._alerts.lines(instances):
            self._say(line)

    async def _probe_readiness(self, client: httpx.AsyncClient, name: str) -> None:
        process = self._view.processes.get(name)
        if process is None or process.ready or process.instance is None or not process.instance.http:
            return
        try:
            reply = await client.get(f"{api_url(process.instance.http, self._view.config)}/readyz")
            process.ready = reply.status_code == httpx.codes.OK
            problems = {} if process.ready else reply.json().get("problems", {})
            # The heartbeat already says what a starting process does.
            process.problem = "; ".join(str(text) for cause, text in problems.items() if cause != STARTING)
        except (httpx.TimeoutException, httpx.ConnectError):
            process.problem = ""  # it imports or loads, and answers no request meanwhile
        except httpx.HTTPError as error:
            process.problem = f"/readyz cannot be read ({type(error).__name__})"

    def _enter_phase(self) -> None:
        view = self._view
        if view.phases.current != "start" or view.waiting_to_start:
            return
        waits_for_evaluation = bool(view.config.evaluation.files) and not view.evaluations
        view.phases.enter("evaluation_before" if waits_for_evaluation else "training")
        self._say(ScreenLine(f"all services are ready after {view.phases.wall_s['start']:.1f} s"))


class GeneratorAlerts:
    """Reports each notice of the learner, and each departure and return of a generator, once."""

    def __init__(self) -> None:
        self._out: set[str] = set()
        self._notices: set[str] = set()

    def lines(self, instances: Sequence[Instance]) -> list[ScreenLine]:
        """The changes since the last call."""
        new = [ScreenLine(text, "warning") for text in _notices(instances) if text not in self._notices]
        self._notices.update(line.text for line in new)
        generators = {generator["name"]: generator for generator in _generators(instances)}
        out = {name for name, generator in generators.items() if generator["state"] == _OUT}
        departed = [ScreenLine(_push_line(generators[name]), "warning") for name in sorted(out - self._out)]
        returned = [ScreenLine(f"{name} has caught up") for name in sorted((self._out - out) & generators.keys())]
        self._out = out
        return new + departed + returned


def generator_problems(instances: Sequence[Instance]) -> list[str]:
    """The learner's notices, and a line for every generator with failed or long pushes."""
    lagging = [
        generator
        for generator in _generators(instances)
        if generator["problem"] or time.time() - (generator["since_unix_s"] or time.time()) > _LONG_PUSH_S
    ]
    return _notices(instances) + [_push_line(generator) for generator in lagging]


def _notices(instances: Sequence[Instance]) -> list[str]:
    return [text for instance in instances for text in instance.facts.get("notices", [])]


def _generators(instances: Sequence[Instance]) -> list[dict[str, Any]]:
    return [generator for instance in instances for generator in instance.facts.get("generators", [])]


def _push_line(generator: dict[str, Any]) -> str:
    why = "the push to it waits for another push" if generator["waiting"] else "the push to it is in flight"
    if generator["problem"]:
        why = f"{generator['num_failures']} pushes failed, the last: {generator['problem']}"
    return (
        f"{generator['name']} is {generator['state']} for {duration(time.time() - generator['since_unix_s'])}, serving "
        f"version {generator['version']}: {why}"
    )


def disk_full_message(run_dir: Path) -> str:
    """A line about a full disk; empty while there is free space.

    The command line reports it, because a full disk also stops Redis and with it the services.
    """
    free_bytes = shutil.disk_usage(run_dir).free
    if free_bytes >= _LEAST_DISK_BYTES:
        return ""
    return (
        f"the disk under {run_dir} is full ({free_bytes / 2**20:.1f} MiB free): the run waits for free disk space, and "
        "continues as soon as there is some"
    )


async def watch_disk_space(run_dir: Path, say: Callable[[ScreenLine], None]) -> None:
    """Report a full disk, and the end of that, without end."""
    was_full = False
    while True:
        message = disk_full_message(run_dir)
        if bool(message) != was_full:
            again = ScreenLine(f"the disk under {run_dir} has free space again")
            say(ScreenLine(message, "warning") if message else again)
        was_full = bool(message)
        await asyncio.sleep(_DISK_POLL_S)
