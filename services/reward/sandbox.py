"""Runs user code for the reward service: each version of it in a sandbox of its own, its calls in warm workers.

A sandbox is a supervisor, which runs no user code, and workers, its confined copies, which load the code and answer
questions. Calls of one session share a worker, those of another never: a worker that served one session is not given
to the next. A worker that fails in any way but an exception of the user's is killed, and so is one that leaves threads
behind. A function of user code
- has one process, with threads, and 256 open files; it makes no other process and starts no program
- reads Python, the installed packages, the system's libraries and what `Code.reads` names; writes in its own scratch
- opens no socket, sees and signals no other process, holds no capability, knows nothing of the service's environment
- ends at the wall clock, processor time, memory, output and scratch that it may have
start.py lists what the levels are made of, levels.py finds out what the machine gives.

Not covered:
- What a function says of its own answers. It shares its process with the harness and can change it, or write the
  answer itself: a reward is what its author makes it. It cannot answer for another function or another session.
- Calls of one session see what earlier calls of it left in memory and scratch, as calls of one program do.
- Time: a function can slow others down by using its share of processors and memory bandwidth, and can learn from
  timing what else runs. Nothing is done against side channels of the hardware.
- The kernel. All levels share it with the machine; a fault in it is a way out. Where code comes from enemies rather
  than from colleagues, run the reward service in a virtual machine.
- At the level landlock: names and sizes of files outside are not readable, but whether a path exists can be told by
  stat; other processes are seen to exist where /proc is mounted without hidepid; scratch lies on disk and is measured
  ten times a second in long calls and four times in quick ones, so that more than its limit can be there for that
  long.
- A service that runs as root takes a user of its own for each sandbox, unless Python's folders or those in `reads`
  are closed to other users: then user code is root without capabilities.
- At the level rlimits: everything but time, memory and state. It is for code that you trust.
Neighbours: calls.py has the types, scorer.py and the doors call, crew.py has the workers, worker_link.py asks them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from typing import Any

import structlog

from services.reward.calls import Answer, CallFailed, Code, FailureKind, Limits, Question
from services.reward.crew import Crew, excess
from services.reward.functions import Signature
from services.reward.imports import Importable, packages_to_share
from services.reward.start import Level
from services.reward.supervisor_link import CannotStart
from services.reward.turns import Place, Turns
from services.reward.values import failure_of
from services.reward.worker_link import Spoiled, WorkerGone, WorkerLink

# Packages are imported before by the supervisor: this is the user's own code at the top of its file.
LOAD_TIMEOUT_S = 30.0
_END_S = 1.0
log = structlog.get_logger()


class Sandbox:
    """One version of a user's code, loaded and warm.

    Args:
        level: How it is contained.
        num_workers: Calls answered at once; further ones wait for a free worker.
    """

    def __init__(self, code: Code, limits: Limits, level: Level, *, num_workers: int = 1) -> None:
        self.code, self.limits, self.level = code, limits, level
        self._signature: Signature | None = None
        self._importable = Importable(code.reads)
        packages = packages_to_share(code.text, self._importable)
        memory_mb = limits.memory_mb
        self._crew = Crew(code.name, level, code.reads, packages, memory_mb=memory_mb, num_workers=num_workers)
        self._looking: set[asyncio.Task[None]] = set()
        self._num_workers, self._turns, self._closing = num_workers, Turns(num_workers), asyncio.Lock()

    @property
    def signature(self) -> Signature:
        """What the function takes; known after `load`."""
        if self._signature is None:
            raise RuntimeError(f"{self.code.name} is not loaded")
        return self._signature

    @property
    def told(self) -> dict[str, Any]:
        """How the supervisor could confine itself; empty before `load`."""
        return self._crew.told

    async def load(self) -> Signature:
        """Start the supervisor and a first worker, and load the code.

        Raises:
            CallFailed: The file raises, takes too long, or holds no function that can be called; `loading` is set.
        """
        place = await self._turns.take(None, alone=True)
        try:
            self._crew.keep(None, await self._new_worker())
        finally:
            self._turns.leave(place)
        return self.signature

    async def call(self, question: Question, *, session: str | None = "") -> Answer:
        """Answer one question.

        Args:
            session: Calls of other sessions see nothing of what this one leaves behind; None: no other call does.

        Raises:
            CallFailed: There are no values; the next call finds a fresh worker where this one cannot be trusted.
        """
        # Where another call made a worker useless, that was not this one's fault: it asks elsewhere, in the end alone.
        for asking, alone in ((session, self.limits.cpu_s is not None), (session, True), (None, True)):
            place = await self._turns.take(asking, alone=alone)
            with contextlib.suppress(Spoiled):
                return await self._call_at(place, question)
        raise CallFailed("forbidden", "its process wrote into the channel of results")  # nobody else was there

    async def close(self) -> None:
        """Wait for the calls under way, then end every process."""
        async with self._closing:
            places = [await self._turns.take(None, alone=True) for _ in range(self._num_workers)]
            await self._crew.close()
            for place in places:
                self._turns.leave(place)

    async def _call_at(self, place: Place, question: Question) -> Answer:
        """A call at a place, which is left behind; its worker is kept for the session, or ended by the last one there.

        Raises:
            Spoiled: Another call made the worker useless.
        """
        keep = False
        try:
            worker = place.worker
            if worker is None:
                worker = await self._crew.take(place.session) or await self._new_worker()
                self._turns.seat(place, worker)
            answer = await self._answer(worker, question)
            keep = True
            return answer
        except CallFailed as error:
            keep = _is_harmless(error)
            raise
        finally:
            await self._leave(place, keep=keep)

    async def _leave(self, place: Place, *, keep: bool) -> None:
        worker = place.worker
        try:
            if worker is None:
                return
            if not keep:
                worker.close()  # who sits there too asks elsewhere
            if not place.is_last:
                return
            if keep and place.session is not None and not worker.spoiled:
                self._crew.keep(place.session, worker)
            else:
                await asyncio.shield(self._crew.end(worker))
        finally:
            self._turns.leave(place)

    async def _answer(self, worker: WorkerLink, question: Question) -> Answer:
        started = time.perf_counter()
        try:
            answer = await self._ask(worker, question, self.limits.timeout_s)
            return Answer(_values(answer), answer["output"], time.perf_counter() - started)
        except CallFailed as error:
            seen = {"traceback": error.traceback, "output": error.output}
            log.warning("reward_call_failed", function=self.code.name, kind=error.kind, reason=str(error), **seen)
            raise

    async def _new_worker(self) -> WorkerLink:
        """A worker with the code loaded.

        Raises:
            CallFailed: It cannot be loaded.
        """
        try:
            worker = await self._crew.start()
        except (CannotStart, ConnectionError) as error:
            raise CallFailed("crash", f"the sandbox cannot be started: {error}", loading=True) from error
        worker.on_slow = lambda mark: self._look_at(worker, mark)
        question = {
            "source": self.code.text,
            "path": self.code.filename,
            "entry": self.code.entry,
            "kind": self.code.kind,
            "folders": [str(folder) for folder in self._importable.folders],
            "modules": {name: str(path) for name, path in self._importable.modules.items()},
        }
        try:
            answer = await self._ask(worker, question, LOAD_TIMEOUT_S)
            signature = Signature.from_answer(answer["signature"])
        except BaseException as error:
            await asyncio.shield(self._crew.end(worker))
            if isinstance(error, CallFailed):
                error.loading, error.args = True, (f"cannot be loaded: {error}",)
                raise
            if isinstance(error, Spoiled | KeyError | TypeError):
                text = "cannot be loaded: its process wrote into the channel of results"
                raise CallFailed("forbidden", text, loading=True) from error
            raise
        self._signature = self._signature or signature
        return worker

    async def _ask(self, worker: WorkerLink, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One question to a worker, which is looked at while it takes long."""
        if self.limits.cpu_s is not None and (look := await self._crew.look(worker)):
            worker.used_s = look.cpu_s
        try:
            answer = await worker.ask(question, timeout_s)
        except WorkerGone:
            raise await self._why_gone(worker) from None
        if "error" in answer:
            raise _failure(answer["error"], answer["output"])
        return answer

    def _look_at(self, worker: WorkerLink, mark: str) -> None:
        task = asyncio.create_task(self._judge(worker, mark), name=f"look-{self.code.name}")
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _judge(self, worker: WorkerLink, mark: str) -> None:
        """Hold a call that takes long to what it may use."""
        look, cpu_s = await self._crew.look(worker), self.limits.cpu_s
        if look is None:
            return
        if cpu_s is not None and look.cpu_s - worker.used_s > cpu_s:
            worker.fail("timeout", f"used more than {cpu_s:g} s of processor time and was killed", mark)
        elif much := excess(look):  # what earlier calls left counts too: whichever is under way fails
            worker.fail(*much)

    async def _why_gone(self, worker: WorkerLink) -> CallFailed:
        code = await self._crew.wait_end(worker, _END_S)
        output = worker.output
        kind: FailureKind = "forbidden" if code == -signal.SIGSYS else "crash"
        return CallFailed(kind, f"its process died ({_cause(code)}){_last(output)}", output=output)


def _is_harmless(error: CallFailed) -> bool:
    """Whether the worker is as good as before: after other failures it may be full, short of something, or gone."""
    return error.kind in ("exception", "invalid_return") and bool(error.error_type)


def _values(answer: dict[str, Any]) -> Any:
    if isinstance(text := answer.get("values_json"), str):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CallFailed("invalid_return", f"returned something that is not JSON: {error}") from error
    if "values" not in answer:
        raise CallFailed("forbidden", "its process answered something else than values")
    return answer["values"]


def _failure(told: Any, output: str) -> CallFailed:
    """What a worker says of an exception; its word, so every part is checked for its type."""
    if not isinstance(told, dict):
        return CallFailed("forbidden", "its process answered something else than an error", output=output)
    failure, line = failure_of(told), told.get("line")
    texts = {name: value if isinstance(value := told.get(name), str) else "" for name in ("type", "traceback")}
    return CallFailed(
        failure.kind,
        failure.reason,
        error_type=texts["type"] or "unknown",
        traceback=texts["traceback"],
        output=output,
        line=line if isinstance(line, int) else None,
    )


def _cause(code: int | None) -> str:
    if code is None:
        return "it closed the channel"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last(output: str) -> str:
    lines = output.strip().splitlines()
    return f"; it last wrote: {lines[-1][:200]}" if lines else ""
