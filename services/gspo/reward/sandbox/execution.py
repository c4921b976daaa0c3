"""Runs user code for the reward service: each version of it in a sandbox of its own, its calls in warm workers.

A sandbox is a supervisor, which runs no user code, and workers, its confined copies, which load the code and answer
one call at a time. Calls of one session share workers; a worker that served one session never serves another. A worker
that fails in any way but an exception of the user's is killed. Between calls it is stopped, and killed if it has
threads left. A function of user code

- has one process, with threads, and 256 open files; it makes no other process and starts no program
- reads Python, the installed packages, the system's libraries and the paths of `Code.reads`; writes in its own scratch
- opens no socket, sees and signals no other process, has no capability, knows nothing of the service's environment
- ends at its limits of wall clock, processor time, memory, output and scratch
- is the first to be ended if the machine runs out of memory

launch.py builds the levels of confinement, levels.py finds the strongest one that the machine supports.

Not covered:

- A function's own answers. It shares its process with the harness and can change it, or write the answer itself: a
  reward is what its author makes it. It cannot answer for another function or another session.
- State within a session. Its calls see the memory and scratch of earlier ones, as calls of one program do. If they
  follow each other without a pause, they also see a thread of an earlier one, for a quarter of a second.
- Time: a function can slow others down by using its share of processors and memory bandwidth, and can learn from
  timing what else runs. There is no defence against side channels of the hardware.
- The kernel. All levels share it with the machine; a fault in it is a way out. If the authors of the code are not
  trusted, run the reward service in a virtual machine.
- Kernel memory of a worker's own descriptors: 256 sockets with full buffers of the default size took 56 MiB.
- Locks by fcntl on files that all may read: functions can signal to each other by them.
- At the level landlock: stat shows size, owner, mode and times of any path. /proc/self shows the host's mounts and
  sockets. Other processes are visible if /proc is mounted without hidepid. Scratch is on disk. It is measured ten
  times a second in long calls and four times in quick ones, and can exceed its limit for that long.
- A service that runs as root gives each sandbox a user of its own. If Python's folders or those in `reads` are closed
  to other users, user code is root without capabilities.
- At the level rlimits: everything but time, memory and state. It is for code that you trust.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import structlog

from gspo.reward.sandbox.calls import Answer, CallError, CallLimits, Code, Question, Signature
from gspo.reward.sandbox.imports import Importable, packages_to_share
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.pool import WorkerPool, excess
from gspo.reward.sandbox.replies import Reply, end_error, reply_error, values_in
from gspo.reward.sandbox.worker_link import WorkerGoneError, WorkerLink, WorkerTaintedError

# For the user's own code at the top of its file: the supervisor has imported the packages before.
LOAD_TIMEOUT_S = 30.0
_END_S = 1.0
log = structlog.get_logger()


class Sandbox:
    """One version of a user's code, loaded and warm.

    Args:
        level: Its confinement.
        num_workers: Calls answered at the same time; further ones wait for a free worker.
        load_timeout_s: Longest that the code may take at the top of its file.
    """

    def __init__(
        self,
        code: Code,
        limits: CallLimits,
        level: ConfinementLevel,
        *,
        num_workers: int = 1,
        load_timeout_s: float | None = None,
    ) -> None:
        self.code, self.limits, self.level = code, limits, level
        self._load_timeout_s = load_timeout_s or LOAD_TIMEOUT_S
        self._signature: Signature | None = None
        self._importable = Importable(code.reads)
        packages = packages_to_share(code.text, self._importable)
        memory_mb = limits.memory_mb
        self._pool = WorkerPool(
            code.name, level, code.reads, packages, self._load, memory_mb=memory_mb, num_workers=num_workers
        )

    @property
    def signature(self) -> Signature:
        """The parameters of the function; known after `load`."""
        if self._signature is None:
            raise RuntimeError(f"{self.code.name} is not loaded")
        return self._signature

    @property
    def supervisor_report(self) -> dict[str, Any]:
        """The supervisor's own confinement; empty before `load`."""
        return self._pool.supervisor_report

    async def load(self) -> Signature:
        """Start the supervisor and a first worker, and load the code.

        Raises:
            CallError: The file raises, takes too long, or holds no function that can be called; `loading` is set.
        """
        await self._pool.start_first()
        return self.signature

    async def call(self, question: Question, *, session: str | None = "") -> Answer:
        """Answer one question.

        Args:
            session: Calls of other sessions share no worker with this one; None: no other call does.

        Raises:
            CallError: There are no values; the next call gets a fresh worker if this one cannot be trusted.
        """
        for fresh in (False, True):
            with suppress(WorkerTaintedError):
                async with self._pool.worker(session, fresh=fresh) as worker:
                    return await self._answer(worker, question)
        # No earlier call tainted the new worker: its own code did, before it was asked anything.
        raise CallError("forbidden", "its process wrote into the channel of results")

    async def close(self) -> None:
        """Wait for the current calls, then end every process."""
        await self._pool.close()

    async def _answer(self, worker: WorkerLink, question: Question) -> Answer:
        started = time.perf_counter()
        try:
            reply = await self._ask(worker, question, self.limits.timeout_s)
            return Answer(values_in(reply, question), reply.output, time.perf_counter() - started)
        except CallError as error:
            seen = {"traceback": error.traceback, "output": error.output}
            log.warning("reward_call_failed", function=self.code.name, kind=error.kind, reason=str(error), **seen)
            raise

    async def _load(self, worker: WorkerLink) -> None:
        """Load the code into a new worker.

        Raises:
            CallError: It cannot be loaded.
        """
        question = {
            "source": self.code.text,
            "path": self.code.filename,
            "entry": self.code.entry,
            "kind": self.code.kind,
            "folders": [str(folder) for folder in self._importable.folders],
            "modules": {name: str(path) for name, path in self._importable.modules.items()},
        }
        try:
            reply = await self._ask(worker, question, self._load_timeout_s)
            if reply.signature is None:
                raise CallError("forbidden", "its process answered something else than a signature")
        except CallError as error:
            error.loading, error.args = True, (f"cannot be loaded: {error}",)
            raise
        self._signature = self._signature or reply.signature.to_signature()

    async def _ask(self, worker: WorkerLink, question: dict[str, Any], timeout_s: float) -> Reply:
        """One question to a worker, which is inspected while it takes long."""
        used_s = 0.0
        if self.limits.cpu_s is not None and (usage := await self._pool.measure(worker)):
            used_s = usage.cpu_s
        try:
            reply = await worker.ask(question, timeout_s, lambda: self._enforce_limits(worker, used_s))
        except WorkerGoneError:
            code = await self._pool.wait_end(worker, _END_S)
            raise end_error(code, worker.output) from None
        if reply.error is not None:
            raise reply_error(reply.error, reply.output)
        return reply

    async def _enforce_limits(self, worker: WorkerLink, used_s: float) -> None:
        """Fail the current call of a worker that uses too much; `used_s` is its processor time before the call."""
        usage, cpu_s = await self._pool.measure(worker), self.limits.cpu_s
        if usage is None:
            return
        if cpu_s is not None and usage.cpu_s - used_s > cpu_s:
            worker.fail("timeout", f"used more than {cpu_s:g} s of processor time and was killed")
        elif failure := excess(usage):  # also if earlier calls left it behind
            worker.fail(*failure)
