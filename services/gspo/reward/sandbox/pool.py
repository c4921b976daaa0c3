"""The workers of one sandbox: forked on demand, kept for their session between calls, ended.

A worker answers one call at a time. Calls wait in a queue, first come first served, for one of `num_workers`. An idle
worker is stopped (SIGSTOP) and then inspected, so nothing of an earlier call runs in it: no thread, no timer, no
handler. A worker that gets call after call is stopped and inspected between two of them every INSPECT_EVERY_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from gspo.reward.sandbox.calls import CallError, FailureKind
from gspo.reward.sandbox.launch import MAX_THREADS, SCRATCH_BYTES, ConfinementLevel
from gspo.reward.sandbox.supervisor_link import SupervisorLink, SupervisorStartError, WorkerUsage
from gspo.reward.sandbox.worker_link import WorkerLink

# Long enough that calls in quick succession do not wait for stops, short enough that user code gains nothing in it.
STOP_AFTER_S = 0.02
INSPECT_EVERY_S = 0.25
log = structlog.get_logger()


class WorkerPool:
    """At most `num_workers` workers.

    Args:
        reads: Paths that user code may read beside Python and the installed packages.
        packages: Packages that the supervisor imports for all workers.
        load: Loads the code into a new worker; it raises CallError.
        memory_mb: Address space of each worker, MiB.
    """

    def __init__(
        self,
        name: str,
        level: ConfinementLevel,
        reads: Sequence[Path],
        packages: Sequence[str],
        load: Callable[[WorkerLink], Awaitable[None]],
        *,
        memory_mb: int,
        num_workers: int,
    ) -> None:
        self._slots = asyncio.Semaphore(num_workers)
        self._name, self._level, self._reads, self._packages, self._load = name, level, reads, packages, load
        self._memory_mb, self._num_workers = memory_mb, num_workers
        self._supervisor: SupervisorLink | None = None
        self._starting, self._closing = asyncio.Lock(), asyncio.Lock()
        self._idle: list[WorkerLink] = []
        self._num_alive = 0
        self._idle_changed = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None

    @property
    def supervisor_report(self) -> dict[str, Any]:
        """The supervisor's own confinement; empty before it runs."""
        return self._supervisor.report if self._supervisor else {}

    async def start_first(self) -> None:
        """Start the supervisor and an idle worker, which has served no session.

        Raises:
            CallError: The code cannot be loaded.
        """
        async with self._slots:
            self._keep(await self._start())

    @asynccontextmanager
    async def worker(self, session: str | None, *, fresh: bool = False) -> AsyncIterator[WorkerLink]:
        """A worker that has loaded the code and served no other session, as soon as one is free.

        It is kept for its session if the block ends, or raises an error that leaves the worker as good as before.
        Otherwise it is ended.

        Args:
            session: None: no other call is to use the worker afterwards.
            fresh: Start a new one in any case.

        Raises:
            CallError: The code cannot be loaded.
        """
        async with self._slots:
            worker = (None if fresh else await self._take(session)) or await self._start()
            keep = False
            try:
                yield worker
                keep = True
            except CallError as error:
                keep = error.is_harmless
                raise
            finally:
                worker.session = session
                if keep and session is not None and not worker.tainted:
                    self._keep(worker)
                else:
                    await asyncio.shield(self._end(worker))

    async def _take(self, session: str | None) -> WorkerLink | None:
        """An idle worker that has served this session alone, or none yet; None if there is no such worker."""
        for served in dict.fromkeys((session, None)):
            while worker := next((idle for idle in self._idle if idle.session == served), None):
                self._idle.remove(worker)
                ready = False
                try:
                    ready = await self._make_ready(worker)
                finally:  # also if the call is cancelled meanwhile
                    if not ready:
                        await asyncio.shield(self._end(worker))
                if ready:
                    worker.session = session
                    return worker
        return None

    async def _start(self) -> WorkerLink:
        """A new worker with the code loaded; the longest idle one is ended for it if there are enough."""
        while self._idle and self._num_alive >= self._num_workers:
            await self._end(self._idle.pop(0))
        try:
            worker = await (await self._running()).start_worker(self._memory_mb)
        except (SupervisorStartError, ConnectionError) as error:
            raise CallError("crash", f"the sandbox cannot be started: {error}", loading=True) from error
        self._num_alive += 1
        try:
            await self._load(worker)
        except BaseException:
            await asyncio.shield(self._end(worker))
            raise
        return worker

    def _keep(self, worker: WorkerLink) -> None:
        """Make a worker idle, for the next call of its session."""
        worker.idle_since = asyncio.get_running_loop().time()
        self._idle.append(worker)
        self._idle_changed.set()
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_idle(), name=f"idle-{self._name}")

    async def _end(self, worker: WorkerLink) -> None:
        """End a worker, and wait until it is gone."""
        self._num_alive -= 1
        worker.close()
        if self._supervisor:
            await self._supervisor.kill(worker.number)

    async def close(self) -> None:
        """Wait for the current calls, then end every process."""
        async with self._closing:
            for _ in range(self._num_workers):
                await self._slots.acquire()
            await self._end_all()
            for _ in range(self._num_workers):
                self._slots.release()

    async def measure(self, worker: WorkerLink) -> WorkerUsage | None:
        """The resources that a worker has used; None if it is gone."""
        return await self._supervisor.measure(worker.number) if self._supervisor else None

    async def wait_end(self, worker: WorkerLink, timeout_s: float) -> int | None:
        """Exit code of a worker that is ending, negative for a signal; None if it is unknown."""
        return await self._supervisor.wait_end(worker.number, timeout_s) if self._supervisor else None

    async def _make_ready(self, worker: WorkerLink) -> bool:
        """Resume a worker; False if an earlier call left something in it."""
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
        """Stop a worker and inspect it; True if it is as clean as a new one."""
        worker.stopped = True
        usage = await self._supervisor.measure(worker.number, stop=True) if self._supervisor else None
        worker.inspected = asyncio.get_running_loop().time()
        return usage is not None and usage.num_threads == 1 and not excess(usage) and not worker.tainted

    async def _stop_idle(self) -> None:
        """Stop workers that are idle for STOP_AFTER_S; end those in which a call left something."""
        loop = asyncio.get_running_loop()
        while True:
            await self._idle_changed.wait()
            self._idle_changed.clear()
            await asyncio.sleep(STOP_AFTER_S)
            for worker in list(self._idle):
                if worker.stopped or worker not in self._idle:  # a call took it during the inspection of another
                    continue
                if loop.time() - worker.idle_since < STOP_AFTER_S:
                    self._idle_changed.set()  # it is inspected in the next pass
                elif not await self._stop(worker) and worker in self._idle:
                    self._idle.remove(worker)
                    await self._end(worker)

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


def excess(usage: WorkerUsage) -> tuple[FailureKind, str] | None:
    """The failure of a worker with too many threads or files; None for any other."""
    if usage.num_threads > MAX_THREADS:
        return "forbidden", f"has {usage.num_threads} threads, at most {MAX_THREADS} are allowed, and was killed"
    if usage.scratch_bytes > SCRATCH_BYTES:
        return "output_too_large", f"wrote more than {SCRATCH_BYTES} bytes of files, or hid some, and was killed"
    return None
