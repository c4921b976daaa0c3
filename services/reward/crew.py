"""The workers of one sandbox: forked from its supervisor as they are needed, kept for their session, ended.

It asks them nothing. Neighbours: sandbox.py takes workers and gives them back, supervisor_link.py forks and ends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from services.reward.calls import FailureKind
from services.reward.start import MAX_THREADS, SCRATCH_BYTES, Level
from services.reward.supervisor_link import Look, SupervisorLink
from services.reward.worker_link import WorkerLink

# Workers that wait for a question are looked at after this time: nothing of a call may go on in them.
IDLE_LOOK_S = 1.0
log = structlog.get_logger()


@dataclass
class _Idle:
    """A worker that waits for a question.

    Attributes:
        session: Whom it served; None: nobody yet.
        seen: Whether it was looked at since.
    """

    session: str | None
    worker: WorkerLink
    seen: bool


class Crew:
    """At most `num_workers` at a time; the caller takes no more than that.

    Args:
        reads: What user code may read beside Python and the installed packages.
        packages: What the supervisor imports for all workers.
        memory_mb: Address space of each worker, MiB.
    """

    def __init__(
        self,
        name: str,
        level: Level,
        reads: Sequence[Path],
        packages: Sequence[str],
        *,
        memory_mb: int,
        num_workers: int,
    ) -> None:
        self._name, self._level, self._reads, self._packages = name, level, reads, packages
        self._memory_mb, self._num_workers = memory_mb, num_workers
        self._supervisor: SupervisorLink | None = None
        self._starting = asyncio.Lock()
        self._idle: list[_Idle] = []
        self._num_alive = 0
        self._left = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    @property
    def told(self) -> dict[str, Any]:
        """How the supervisor could confine itself; empty before there is one."""
        return self._supervisor.told if self._supervisor else {}

    async def take(self, session: str | None) -> WorkerLink | None:
        """A worker that has loaded the code and served this session alone, or nobody; None where there is none."""
        for wanted in dict.fromkeys((session, None)):
            for idle in [idle for idle in self._idle if idle.session == wanted]:
                self._idle.remove(idle)
                if idle.worker.alive and not idle.worker.spoiled:
                    return idle.worker
                await self.end(idle.worker)
        return None

    async def start(self) -> WorkerLink:
        """A new worker without code; the one that waited longest makes room for it.

        Raises:
            CannotStart: The supervisor does not come up.
            ConnectionError: The supervisor is gone.
        """
        while self._idle and self._num_alive >= self._num_workers:
            await self.end(self._idle.pop(0).worker)
        worker = await (await self._running()).start_worker(self._memory_mb)
        self._num_alive += 1
        return worker

    def keep(self, session: str | None, worker: WorkerLink) -> None:
        """Hold a worker for its session; None: it has served nobody."""
        self._idle.append(_Idle(session, worker, seen=session is None))
        self._left.set()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_after_idle(), name=f"idle-{self._name}")

    async def end(self, worker: WorkerLink) -> None:
        """End a worker, and wait until it is gone."""
        self._num_alive -= 1
        worker.close()
        if self._supervisor:
            await self._supervisor.kill(worker.number)

    async def close(self) -> None:
        """End every process."""
        if self._looking:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
            self._looking = None
        for idle in self._idle:
            idle.worker.close()
        self._num_alive -= len(self._idle)
        self._idle.clear()
        if self._supervisor:
            await self._supervisor.close()
            self._supervisor = None

    async def look(self, worker: WorkerLink) -> Look | None:
        """What a worker has used; None where it is gone."""
        return await self._supervisor.look(worker.number) if self._supervisor else None

    async def wait_end(self, worker: WorkerLink, timeout_s: float) -> int | None:
        """Exit code of a worker that is ending, negative for a signal; None where nobody can tell."""
        return await self._supervisor.wait_end(worker.number, timeout_s) if self._supervisor else None

    async def _running(self) -> SupervisorLink:
        async with self._starting:
            if self._supervisor and not self._supervisor.alive:
                log.error("supervisor_died", function=self._name)
                await self.close()
            if self._supervisor is None:
                self._supervisor = await SupervisorLink.start(self._level, self._reads, self._packages)
            return self._supervisor

    async def _look_after_idle(self) -> None:
        """End workers in which a call left something that goes on or lies about."""
        while True:
            await self._left.wait()
            self._left.clear()
            await asyncio.sleep(IDLE_LOOK_S)
            for idle in [idle for idle in self._idle if not idle.seen]:
                idle.seen = True
                look = await self.look(idle.worker)
                if idle in self._idle and (look is None or idle.worker.spoiled or look.num_threads > 1 or excess(look)):
                    self._idle.remove(idle)
                    await self.end(idle.worker)


def excess(look: Look) -> tuple[FailureKind, str] | None:
    """What a worker has too much of."""
    if look.num_threads > MAX_THREADS:
        return "forbidden", f"has {look.num_threads} threads, at most {MAX_THREADS} are allowed, and was killed"
    if look.scratch_bytes > SCRATCH_BYTES:
        return "output_too_large", f"wrote more than {SCRATCH_BYTES} bytes of files, or hid some, and was killed"
    return None
