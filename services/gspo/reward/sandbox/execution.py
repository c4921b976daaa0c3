"""Runs user code for the reward service: each version of it in a sandbox of its own, its calls in warm workers.

A sandbox is a supervisor, which runs no user code, and workers, its confined copies, which load the code and answer
one call at a time. Calls of one session share workers; a worker that served one session never serves another. A worker
that fails in any way but an exception of the user's is killed. Between calls it is stopped, and killed if it has
threads left. A function of user code

- has one process, with threads, and 256 open files; it makes no other process and starts no program
- reads Python, the installed packages, the system's libraries and the paths of `Code.reads`; writes in its own scratch
- imports the modules that it takes along (`Code.modules`), which come as texts and not as files
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

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import Any, TypeAlias

import structlog

from gspo.common.errors import InputError
from gspo.reward.sandbox.calls import (
    OF_TOKENIZER,
    Answer,
    CallError,
    CallLimits,
    Code,
    FailureKind,
    Question,
    Signature,
)
from gspo.reward.sandbox.inside.supervisor import MOST_WATCH_BYTES
from gspo.reward.sandbox.launch import MAX_THREADS, SCRATCH_BYTES, ConfinementLevel, Importable, packages_to_share
from gspo.reward.sandbox.supervisor_link import SupervisorLink, WorkerUsage
from gspo.reward.sandbox.values import Reply, end_error, reply_error, values_in
from gspo.reward.sandbox.worker_link import FORGED_REPLY, WorkerGoneError, WorkerLink, WorkerTaintedError

# For the user's own code at the top of its file: the supervisor has imported the packages before.
LOAD_TIMEOUT_S = 30.0
_END_S = 1.0
# Long enough that calls in quick succession do not wait for stops, short enough that user code gains nothing in it.
STOP_AFTER_S = 0.02
INSPECT_EVERY_S = 0.25
# It takes seconds to import; a worker would do that in the time of its start.
TOKENIZER_MODULE = "transformers.models.auto.tokenization_auto"
_HAS_TRANSFORMERS = find_spec("transformers") is not None
ReadTokenizer: TypeAlias = Callable[[], Mapping[str, bytes]]
log = structlog.get_logger()


class Sandbox:
    """One version of a user's code, loaded and warm in at most `num_workers` workers.

    Workers are forked on demand and kept for their session between calls. An idle worker is stopped (SIGSTOP) and then
    inspected, so nothing of an earlier call runs in it: no thread, no timer, no handler. A worker that gets call after
    call is stopped and inspected between two of them every INSPECT_EVERY_S.

    Args:
        level: Its confinement.
        num_workers: Calls answered at the same time; further ones wait for a free worker, first come first served.
        load_timeout_s: Longest that the code may take at the top of its file.
        read_tokenizer: Reads the tokenizer's files for a function that names it; None where there is no model.
    """

    def __init__(
        self,
        code: Code,
        limits: CallLimits,
        level: ConfinementLevel,
        *,
        num_workers: int = 1,
        load_timeout_s: float | None = None,
        read_tokenizer: ReadTokenizer | None = None,
    ) -> None:
        self._read_tokenizer = read_tokenizer
        self.code, self.limits, self.level = code, limits, level
        self._load_timeout_s = load_timeout_s or LOAD_TIMEOUT_S
        self._signature: Signature | None = None
        self._importable = Importable(code.reads, code.modules)
        self._num_workers, self._slots = num_workers, asyncio.Semaphore(num_workers)
        self._supervisor: SupervisorLink | None = None
        self._starting, self._closing = asyncio.Lock(), asyncio.Lock()
        self._idle: list[WorkerLink] = []
        self._num_alive = 0
        self._stopping: asyncio.Task[None] | None = None

    @property
    def signature(self) -> Signature:
        if self._signature is None:
            raise RuntimeError(f"{self.code.name} is not loaded")
        return self._signature

    @property
    def supervisor_report(self) -> dict[str, Any]:
        """The supervisor's own confinement; empty before `load`."""
        return self._supervisor.report if self._supervisor else {}

    async def load(self) -> Signature:
        """Start the supervisor and a first worker, which has served no session, and load the code.

        Raises:
            CallError: The file raises, takes too long, or holds no function that can be called; `loading` is set.
        """
        async with self._slots:
            self._keep(await self._start_worker())
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
                async with self._worker(session, fresh=fresh) as worker:
                    reply = await self._ask(worker, question, self.limits.timeout_s)
                    return Answer(values_in(reply, question), reply.output, reply.logged_json)
        # No earlier call tainted the new worker: its own code did, before it was asked anything.
        raise CallError("forbidden", FORGED_REPLY)

    async def close(self) -> None:
        """Wait for the current calls, then end every process."""
        async with self._closing:
            for _ in range(self._num_workers):
                await self._slots.acquire()
            await self._end_all()
            for _ in range(self._num_workers):
                self._slots.release()

    @asynccontextmanager
    async def _worker(self, session: str | None, *, fresh: bool = False) -> AsyncIterator[WorkerLink]:
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
            worker = (None if fresh else await self._take(session)) or await self._start_worker()
            keep = True
            try:
                yield worker
            except BaseException as error:
                keep = isinstance(error, CallError) and error.is_harmless
                if isinstance(error, CallError):
                    seen = {"traceback": error.traceback, "output": error.output}
                    log.warning(
                        "reward_call_failed", function=self.code.name, kind=error.kind, reason=str(error), **seen
                    )
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
                    return worker
        return None

    async def _start_worker(self) -> WorkerLink:
        """A new worker with the code loaded; the longest idle one is ended for it if there are enough."""
        while self._idle and self._num_alive >= self._num_workers:
            await self._end(self._idle.pop(0))
        try:
            worker = await WorkerLink.start(await self._running_supervisor(), self.limits.memory_mb)
        except OSError as error:
            raise CallError("crash", f"the sandbox cannot be started: {error}", loading=True) from error
        self._num_alive += 1
        try:
            await self._load_code(worker)
        except BaseException:
            await asyncio.shield(self._end(worker))
            raise
        return worker

    async def _load_code(self, worker: WorkerLink) -> None:
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
            "texts": dict(self.code.modules),
            "modules": {name: str(path) for name, path in self._importable.modules.items()},
        }
        try:
            reply = await self._ask(worker, question, self._load_timeout_s)
            if reply.signature is None:
                raise CallError("forbidden", "its process answered something else than a signature")
            if reply.signature.convention == "trl" and reply.signature.takes & OF_TOKENIZER:
                await self._load_tokenizer(worker, reply.signature)
        except CallError as error:
            error.loading, error.args = True, (f"cannot be loaded: {error}",)
            raise
        self._signature = self._signature or reply.signature

    async def _load_tokenizer(self, worker: WorkerLink, signature: Signature) -> None:
        """Load the tokenizer into a new worker; one that has a default may be missing.

        Raises:
            CallError: It cannot be loaded, and the function needs it.
        """
        try:
            if self._read_tokenizer is None:
                raise CallError("exception", "there is no model here")
            files = await asyncio.to_thread(self._read_tokenizer)
            await self._ask(worker, {"tokenizer": files}, self._load_timeout_s)
        except (CallError, InputError, OSError) as error:
            text = f"its parameter for the tokenizer cannot be filled: {error}"
            if OF_TOKENIZER.intersection(signature.required) or worker.tainted:
                raise CallError("exception", text, error_type="UnfitTokenizerError") from error
            log.warning("no_tokenizer", function=self.code.name, reason=text)

    async def _ask(self, worker: WorkerLink, question: dict[str, Any], timeout_s: float) -> Reply:
        """One question to a worker, which is inspected while it takes long."""
        used_s = 0.0
        if self.limits.cpu_s is not None and (usage := await worker.supervisor.measure(worker.number)):
            used_s = usage.cpu_s
        try:
            reply = await worker.ask(question, timeout_s, lambda: self._enforce_limits(worker, used_s))
        except WorkerGoneError:
            code = await worker.supervisor.wait_end(worker.number, _END_S)
            raise end_error(code, worker.output) from None
        if reply.error is not None:
            raise reply_error(reply.error, reply.output)
        return reply

    async def _enforce_limits(self, worker: WorkerLink, used_s: float) -> None:
        """Fail the current call of a worker that uses too much; `used_s` is its processor time before the call."""
        usage, cpu_s = await worker.supervisor.measure(worker.number), self.limits.cpu_s
        if usage is None:
            return
        if cpu_s is not None and usage.cpu_s - used_s > cpu_s:
            worker.fail("timeout", f"used more than {cpu_s:g} s of processor time and was killed")
        elif failure := excess(usage):  # also if earlier calls left it behind
            worker.fail(*failure)

    def _keep(self, worker: WorkerLink) -> None:
        """Make a worker idle, for the next call of its session."""
        worker.idle_since = asyncio.get_running_loop().time()
        self._idle.append(worker)
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.create_task(self._stop_idle(), name=f"idle-{self.code.name}")

    async def _end(self, worker: WorkerLink) -> None:
        """End a worker, and wait until it is gone."""
        self._num_alive -= 1
        worker.close()
        await worker.supervisor.kill(worker.number)

    async def _make_ready(self, worker: WorkerLink) -> bool:
        """Resume a worker; False if an earlier call left something in it."""
        if not worker.alive or worker.tainted:
            return False
        now = asyncio.get_running_loop().time()
        if not worker.stopped and now - worker.inspected > INSPECT_EVERY_S and not await self._stop(worker):
            return False
        if worker.stopped:
            worker.supervisor.resume(worker.number)
            worker.stopped = False
        return True

    async def _stop(self, worker: WorkerLink) -> bool:
        """Stop a worker and inspect it; True if it is as clean as a new one."""
        worker.stopped = True
        usage = await worker.supervisor.measure(worker.number, stop=True)
        worker.inspected = asyncio.get_running_loop().time()
        return usage is not None and usage.num_threads == 1 and not excess(usage) and not worker.tainted

    async def _stop_idle(self) -> None:
        """Stop workers that are idle for STOP_AFTER_S; end those in which a call left something."""
        loop = asyncio.get_running_loop()
        while running := [worker for worker in self._idle if not worker.stopped]:
            await asyncio.sleep(STOP_AFTER_S)
            for worker in running:
                # A call may have taken it, even during the inspection of another.
                if worker.stopped or worker not in self._idle or loop.time() - worker.idle_since < STOP_AFTER_S:
                    continue
                if not await self._stop(worker) and worker in self._idle:
                    self._idle.remove(worker)
                    await self._end(worker)

    async def _running_supervisor(self) -> SupervisorLink:
        async with self._starting:
            if self._supervisor and not self._supervisor.alive:
                log.error("supervisor_died", function=self.code.name)
                await self._end_all()
            if self._supervisor is None:
                packages = packages_to_share([self.code.text, *self.code.modules.values()], self._importable)
                if self._read_tokenizer and any(name in self.code.text for name in OF_TOKENIZER) and _HAS_TRANSFORMERS:
                    packages.append(TOKENIZER_MODULE)
                self._supervisor = await SupervisorLink.start(
                    self.level, self.code.reads, packages, num_workers=self._num_workers
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
    """The failure of a worker with too many threads, files or watches; None for any other."""
    if usage.num_threads > MAX_THREADS:
        return "forbidden", f"has {usage.num_threads} threads, at most {MAX_THREADS} are allowed, and was killed"
    if usage.watch_bytes > MOST_WATCH_BYTES:
        return "forbidden", f"has {MOST_WATCH_BYTES} bytes of watches, or of locks on files, and was killed"
    if usage.scratch_bytes > SCRATCH_BYTES:
        return "output_too_large", f"wrote more than {SCRATCH_BYTES} bytes of files, or hid some, and was killed"
    return None
