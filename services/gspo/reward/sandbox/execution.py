"""Runs user code for the reward service: each version of it in a sandbox of its own, its calls in warm workers.

A sandbox is a supervisor, which runs no user code, and workers, its confined copies, which load the code and answer
one call at a time. Calls of one session share workers, those of another never: a worker that served one session is not
given to the next. A worker that fails in any way but an exception of the user's is killed. Between calls it is stopped,
and killed if it has threads left. A function of user code
- has one process, with threads, and 256 open files; it makes no other process and starts no program
- reads Python, the installed packages, the system's libraries and what `Code.reads` names; writes in its own scratch
- opens no socket, sees and signals no other process, holds no capability, knows nothing of the service's environment
- ends at the wall clock, processor time, memory, output and scratch that it may have
- is the first to be ended where the machine's memory ends
start.py lists what the levels are made of, levels.py finds out what the machine gives.

Not covered:
- What a function says of its own answers. It shares its process with the harness and can change it, or write the
  answer itself: a reward is what its author makes it. It cannot answer for another function or another session.
- Calls of one session see what earlier calls of it left in memory and scratch, as calls of one program do; where calls
  follow each other without a pause, also a thread of an earlier one, for a quarter of a second.
- Time: a function can slow others down by using its share of processors and memory bandwidth, and can learn from
  timing what else runs. Nothing is done against side channels of the hardware.
- The kernel. All levels share it with the machine; a fault in it is a way out. Where code comes from enemies rather
  than from colleagues, run the reward service in a virtual machine.
- Kernel memory of a worker's own descriptors: 256 sockets with full buffers of the default size held 56 MiB.
- Locks by fcntl on files that all may read: functions that want to can signal to each other by them.
- At the level landlock: stat tells size, owner, mode and times of any path, and /proc/self the host's mounts and
  sockets; other processes are seen to exist where /proc is mounted without hidepid; scratch lies on disk and is
  measured ten times a second in long calls and four times in quick ones, so that more than its limit can be there for
  that long.
- A service that runs as root takes a user of its own for each sandbox, unless Python's folders or those in `reads`
  are closed to other users: then user code is root without capabilities.
- At the level rlimits: everything but time, memory and state. It is for code that you trust.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import msgspec
import structlog

from gspo.reward.functions.arguments import Signature
from gspo.reward.sandbox.calls import Answer, CallError, CallLimits, Code, FailureKind, Question
from gspo.reward.sandbox.imports import Importable, packages_to_share
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.pool import WorkerPool, excess
from gspo.reward.sandbox.replies import Reply
from gspo.reward.sandbox.supervisor_link import SupervisorStartError
from gspo.reward.sandbox.values import MAX_NAME_CHARS, failure_of, plain_json
from gspo.reward.sandbox.worker_link import WorkerGoneError, WorkerLink, WorkerTaintedError

# Packages are imported before by the supervisor: this is the user's own code at the top of its file.
LOAD_TIMEOUT_S = 30.0
_END_S = 1.0
_MAX_LINE = 10**6
log = structlog.get_logger()


class Sandbox:
    """One version of a user's code, loaded and warm.

    Args:
        level: How it is contained.
        num_workers: Calls answered at once; further ones wait for a free worker.
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
        self._pool = WorkerPool(code.name, level, code.reads, packages, memory_mb=memory_mb, num_workers=num_workers)
        self._looking: dict[int, asyncio.Task[None]] = {}

    @property
    def signature(self) -> Signature:
        """What the function takes; known after `load`."""
        if self._signature is None:
            raise RuntimeError(f"{self.code.name} is not loaded")
        return self._signature

    @property
    def told(self) -> dict[str, Any]:
        """How the supervisor could confine itself; empty before `load`."""
        return self._pool.told

    async def load(self) -> Signature:
        """Start the supervisor and a first worker, and load the code.

        Raises:
            CallError: The file raises, takes too long, or holds no function that can be called; `loading` is set.
        """
        async with self._pool.free:
            self._pool.keep(await self._new_worker())
        return self.signature

    async def call(self, question: Question, *, session: str | None = "") -> Answer:
        """Answer one question.

        Args:
            session: Calls of other sessions see nothing of what this one leaves behind; None: no other call does.

        Raises:
            CallError: There are no values; the next call finds a fresh worker where this one cannot be trusted.
        """
        async with self._pool.free:
            worker = await self._pool.take(session) or await self._new_worker()
            try:
                return await self._call_in(worker, question, session)
            except WorkerTaintedError:  # by an earlier call
                worker = await self._new_worker()
            try:
                return await self._call_in(worker, question, session)
            except WorkerTaintedError as error:  # by its own code, before it was asked anything
                raise CallError("forbidden", "its process wrote into the channel of results") from error

    async def close(self) -> None:
        """Wait for the calls under way, then end every process."""
        await self._pool.close()

    async def _call_in(self, worker: WorkerLink, question: Question, session: str | None) -> Answer:
        """A call in a worker, which is kept for the session afterwards, or ended.

        Raises:
            WorkerTaintedError: An earlier call made the worker useless.
        """
        keep = False
        try:
            answer = await self._answer(worker, question)
            keep = True
            return answer
        except CallError as error:
            keep = _is_harmless(error)
            raise
        finally:
            worker.session = session
            if keep and session is not None and not worker.tainted:
                self._pool.keep(worker)
            else:
                await asyncio.shield(self._pool.end(worker))

    async def _answer(self, worker: WorkerLink, question: Question) -> Answer:
        started = time.perf_counter()
        try:
            reply = await self._ask(worker, question, self.limits.timeout_s)
            return Answer(_values(reply, question), reply.output, time.perf_counter() - started)
        except CallError as error:
            seen = {"traceback": error.traceback, "output": error.output}
            log.warning("reward_call_failed", function=self.code.name, kind=error.kind, reason=str(error), **seen)
            raise

    async def _new_worker(self) -> WorkerLink:
        """A worker with the code loaded.

        Raises:
            CallError: It cannot be loaded.
        """
        try:
            worker = await self._pool.start()
        except (SupervisorStartError, ConnectionError) as error:
            raise CallError("crash", f"the sandbox cannot be started: {error}", loading=True) from error
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
        except BaseException as error:
            await asyncio.shield(self._pool.end(worker))
            if isinstance(error, CallError):
                error.loading, error.args = True, (f"cannot be loaded: {error}",)
            raise
        self._signature = self._signature or Signature.from_reply(reply.signature)
        return worker

    async def _ask(self, worker: WorkerLink, question: dict[str, Any], timeout_s: float) -> Reply:
        """One question to a worker, which is looked at while it takes long."""
        if self.limits.cpu_s is not None and (look := await self._pool.look(worker)):
            worker.used_s = look.cpu_s
        try:
            reply = await worker.ask(question, timeout_s, lambda: self._look_at(worker))
        except WorkerGoneError:
            raise await self._why_gone(worker) from None
        if reply.error is not None:
            raise _failure(reply)
        return reply

    def _look_at(self, worker: WorkerLink) -> None:
        if worker.number in self._looking:  # the supervisor is busy
            return
        task = asyncio.create_task(self._judge(worker, worker.asked), name=f"look-{self.code.name}")
        self._looking[worker.number] = task
        task.add_done_callback(lambda _: self._looking.pop(worker.number))

    async def _judge(self, worker: WorkerLink, asked: str) -> None:
        """Hold a call that takes long to what it may use."""
        look, cpu_s = await self._pool.look(worker), self.limits.cpu_s
        if look is None or worker.asked != asked:
            return
        if cpu_s is not None and look.cpu_s - worker.used_s > cpu_s:
            worker.fail("timeout", f"used more than {cpu_s:g} s of processor time and was killed")
        elif much := excess(look):  # what earlier calls left counts too: whichever is under way fails
            worker.fail(*much)

    async def _why_gone(self, worker: WorkerLink) -> CallError:
        code = await self._pool.wait_end(worker, _END_S)
        output = worker.output
        kind: FailureKind = "forbidden" if code == -signal.SIGSYS else "crash"
        return CallError(kind, f"its process died ({_cause(code)}){_last(output)}", output=output)


def _is_harmless(error: CallError) -> bool:
    """Whether the worker is as good as before: after other failures it may be full, short of something, or gone."""
    return error.kind in ("exception", "invalid_return") and bool(error.error_type)


def _values(reply: Reply, question: Question) -> Any:
    """The values of a batch, or the JSON value of an environment's function."""
    if "function" not in question:
        if reply.values is None:
            raise CallError("forbidden", "its process answered something else than values")
        return reply.values
    if reply.values_json is None:
        raise CallError("forbidden", "its process answered something else than a JSON value")
    try:
        return plain_json(reply.values_json)
    except (ValueError, RecursionError) as error:
        raise CallError("invalid_return", f"returned something that is not JSON: {error}") from error


def _failure(reply: Reply) -> CallError:
    """What a worker says of an exception."""
    told = reply.error
    assert told is not None  # noqa: S101 - the caller looked
    failure = failure_of(msgspec.structs.asdict(told))
    return CallError(
        failure.kind,
        failure.reason,
        error_type=told.type[:MAX_NAME_CHARS] or "unknown",
        traceback=failure.traceback,
        output=reply.output,
        line=told.line if type(told.line) is int and 0 < told.line < _MAX_LINE else None,
    )


def _cause(code: int | None) -> str:
    if code is None:
        return "it closed the channel"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last(output: str) -> str:
    lines = output.strip().splitlines()
    return f"; it last wrote: {lines[-1][:200]}" if lines else ""
