"""The workers of one sandbox: forked as they are needed, kept for their session between calls, ended.

A worker answers one call at a time. Calls wait in a queue, first come first served, for one of `num_workers`. A worker
that waits for a call is stopped (SIGSTOP) and then looked at, so nothing of an earlier call goes on in it: no thread,
no timer, no handler. One that gets call after call is stopped and looked at between two of them every INSPECT_EVERY_S.
It asks workers nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from gspo.reward.sandbox.calls import FailureKind
from gspo.reward.sandbox.launch import MAX_THREADS, SCRATCH_BYTES, ConfinementLevel
from gspo.reward.sandbox.supervisor_link import SupervisorLink, WorkerUsage
from gspo.reward.sandbox.worker_link import WorkerLink

# Long enough that calls which follow each other do not wait for stops, short enough that nothing is gained in it.
STOP_AFTER_S = 0.02
INSPECT_EVERY_S = 0.25
log = structlog.get_logger()


class WorkerPool:
    """At most `num_workers` workers.

    Attributes:
        free: Held by each call from before it takes a worker until it has given it back.

    Args:
        reads: What user code may read beside Python and the installed packages.
        packages: What the supervisor imports for all workers.
        memory_mb: Address space of each worker, MiB.
    """

    def __init__(
        self,
        name: str,
        level: ConfinementLevel,
        reads: Sequence[Path],
        packages: Sequence[str],
        *,
        memory_mb: int,
        num_workers: int,
    ) -> None:
        self.free = asyncio.Semaphore(num_workers)
        self._name, self._level, self._reads, self._packages = name, level, reads, packages
        self._memory_mb, self._num_workers = memory_mb, num_workers
        self._supervisor: SupervisorLink | None = None
        self._starting, self._closing = asyncio.Lock(), asyncio.Lock()
        self._idle: list[WorkerLink] = []
        self._num_alive = 0
        self._given_back = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None

    @property
    def told(self) -> dict[str, Any]:
        """How the supervisor could confine itself; empty before there is one."""
        return self._supervisor.told if self._supervisor else {}

    async def take(self, session: str | None) -> WorkerLink | None:
        """A worker that has loaded the code and served this session alone, or nobody; None where there is none."""
        for wanted in dict.fromkeys((session, None)):
            while worker := next((one for one in self._idle if one.session == wanted), None):
                self._idle.remove(worker)
                ready = False
                try:
                    ready = await self._make_ready(worker)
                finally:  # also where the call is cancelled meanwhile
                    if not ready:
                        await asyncio.shield(self.end(worker))
                if ready:
                    worker.session = session
                    return worker
        return None

    async def start(self) -> WorkerLink:
        """A new worker without code; the one that waited longest makes room for it.

        Raises:
            SupervisorStartError: The supervisor does not come up.
            ConnectionError: The supervisor is gone.
        """
        while self._idle and self._num_alive >= self._num_workers:
            await self.end(self._idle.pop(0))
        worker = await (await self._running()).start_worker(self._memory_mb)
        self._num_alive += 1
        return worker

    def keep(self, worker: WorkerLink) -> None:
        """Hold a worker for the next call of its session."""
        worker.idle_since = asyncio.get_running_loop().time()
        self._idle.append(worker)
        self._given_back.set()
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_idle(), name=f"idle-{self._name}")

    async def end(self, worker: WorkerLink) -> None:
        """End a worker, and wait until it is gone."""
        self._num_alive -= 1
        worker.close()
        if self._supervisor:
            await self._supervisor.kill(worker.number)

    async def close(self) -> None:
        """Wait for the calls under way, then end every process."""
        async with self._closing:
            for _ in range(self._num_workers):
                await self.free.acquire()
            await self._end_all()
            for _ in range(self._num_workers):
                self.free.release()

    async def look(self, worker: WorkerLink) -> WorkerUsage | None:
        """What a worker has used; None where it is gone."""
        return await self._supervisor.look(worker.number) if self._supervisor else None

    async def wait_end(self, worker: WorkerLink, timeout_s: float) -> int | None:
        """Exit code of a worker that is ending, negative for a signal; None where nobody can tell."""
        return await self._supervisor.wait_end(worker.number, timeout_s) if self._supervisor else None

    async def _make_ready(self, worker: WorkerLink) -> bool:
        """Let a worker go on, unless an earlier call left something in it."""
        if not worker.alive or worker.tainted or self._supervisor is None:
            return False
        now = asyncio.get_running_loop().time()
        if not worker.stopped and now - worker.inspected > INSPECT_EVERY_S and not await self._stop(worker):
            return False
        if worker.stopped:
            self._supervisor.resume(worker.number)
            worker.stopped = False
        return True

    async def _stop(self, worker: WorkerLink) -> bool:
        """Stop a worker and look at it: whether it is as clean as a new one."""
        worker.stopped = True
        look = await self._supervisor.look(worker.number, stop=True) if self._supervisor else None
        worker.inspected = asyncio.get_running_loop().time()
        return look is not None and look.num_threads == 1 and not excess(look) and not worker.tainted

    async def _stop_idle(self) -> None:
        """Stop workers that no call has taken for a moment; end those in which a call left something."""
        loop = asyncio.get_running_loop()
        while True:
            await self._given_back.wait()
            self._given_back.clear()
            await asyncio.sleep(STOP_AFTER_S)
            for worker in list(self._idle):
                if worker.stopped or worker not in self._idle:  # a call took it while another one was looked at
                    continue
                if loop.time() - worker.idle_since < STOP_AFTER_S:
                    self._given_back.set()  # it is looked at in the next round
                elif not await self._stop(worker) and worker in self._idle:
                    self._idle.remove(worker)
                    await self.end(worker)

    async def _running(self) -> SupervisorLink:
        async with self._starting:
            if self._supervisor and not self._supervisor.alive:
                log.error("supervisor_died", function=self._name)
                await self._end_all()
            if self._supervisor is None:
                self._supervisor = await SupervisorLink.start(
                    self._level, self._reads, self._packages, num_workers=self._num_workers
                )
            return self._supervisor

    async def _end_all(self) -> None:
        if self._stopping:
            self._stopping.cancel()
            await asyncio.gather(self._stopping, return_exceptions=True)
            self._stopping = None
        for worker in self._idle:
            worker.close()
        self._num_alive -= len(self._idle)
        self._idle.clear()
        if self._supervisor:
            await self._supervisor.close()
            self._supervisor = None


def excess(look: WorkerUsage) -> tuple[FailureKind, str] | None:
    """What a worker has too much of."""
    if look.num_threads > MAX_THREADS:
        return "forbidden", f"has {look.num_threads} threads, at most {MAX_THREADS} are allowed, and was killed"
    if look.scratch_bytes > SCRATCH_BYTES:
        return "output_too_large", f"wrote more than {SCRATCH_BYTES} bytes of files, or hid some, and was killed"
    return None
