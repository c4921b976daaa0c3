"""Keeps the processes of a run alive until the run ends, then ends them all.

A process that dies is started again after a growing pause. A service ends the run with its last words if it refuses its
input (exit code 2), or dies too often. Or it dies twice of the same error, and no cause outside of it explains that.
One that asks for its start (exit code 4) does not count as dead.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from gspo.cli.processes.child import Child, LocalChild, Program
from gspo.cli.processes.exit_codes import RunError, ServiceRefusedError
from gspo.cli.processes.guard import start_guard
from gspo.common.errors import EXIT_BAD_INPUT, EXIT_START_AGAIN
from gspo.common.host.module_command import SUPERVISOR_VARIABLE
from gspo.common.service.failure import ProcessFailure
from gspo.common.tasks import wait_until_set

# A service that ran so long before it died is not in a crash loop: its deaths are counted from 1 again.
STEADY_S = 600.0
# A service that ran so long did not die of its start, so the pause before the next start need not grow.
_STARTED_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_TERMINATE_S, _KILL_S, _SWEEP_S = 15.0, 5.0, 10.0
# A longer shutdown is announced, because nothing else changes on the screen meanwhile.
_QUIET_S = 2.0


class ProcessSupervisor:
    """Starts programs, keeps them alive, ends them; use it as an asynchronous context.

    Args:
        log_dir: Folder of the log files.
        max_restarts: Deaths of one program that are answered by a restart.
        say: Called with a line for the user.
        supervisor_id: Identifies its processes to the guard; a new one by default.

    Attributes:
        children: All programs, by name.
        policies: A file in memory for the policies of the generators, which it outlives.
    """

    policies: Path

    def __init__(self, log_dir: Path, max_restarts: int, say: Callable[[str], None], supervisor_id: str = "") -> None:
        self._log_dir, self._max_restarts, self._say = log_dir, max_restarts, say
        self._supervisor_id = supervisor_id or uuid.uuid4().hex
        self._guard: subprocess.Popen[str] | None = None
        self.children: dict[str, Child] = {}
        self._retired: set[str] = set()
        self._keepers: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Event()

    async def __aenter__(self) -> ProcessSupervisor:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._guard = start_guard(self._supervisor_id)
        self._memory = os.memfd_create("gspo-policies")
        self.policies = Path(f"/proc/{os.getpid()}/fd/{self._memory}")
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.shield(self.end(patience_s=0.0))
        os.close(self._memory)

    def start(self, programs: Iterable[Program]) -> None:
        """Start programs and keep them alive from now on."""
        for program in programs:
            make_child = program.place or LocalChild
            variables = {SUPERVISOR_VARIABLE: self._supervisor_id}
            child = self.children[program.name] = make_child(program, self._log_dir, variables)
            self._keepers.add(asyncio.create_task(self._keep(child), name=program.name))

    async def watch(self) -> None:
        """Run until a program cannot be kept alive.

        Raises:
            ServiceRefusedError: A program ended with exit code 2.
            RunError: A program died too often, or twice of the same error.
        """
        while self._keepers:
            done, _ = await asyncio.wait(self._keepers, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            self._keepers -= done  # others may have been added
            for keeper in done:
                if not keeper.cancelled():
                    keeper.result()
        await self._ending.wait()

    async def retire(self, names: Iterable[str], terminate_s: float) -> None:
        """End programs that are no longer needed, and forget them.

        Args:
            terminate_s: From SIGTERM to SIGKILL.
        """
        retired = {name: self.children[name] for name in names}
        self._retired.update(retired)
        await self._end_all(list(retired.values()), 0.0, terminate_s)
        keepers = {keeper for keeper in self._keepers if keeper.get_name() in retired}
        if keepers:
            await asyncio.wait(keepers, timeout=_KILL_S)
        for keeper in keepers:
            keeper.cancel()  # it waits for a place, or before a restart
        for name in retired:
            del self.children[name]
        self._retired.difference_update(retired)

    async def end(
        self, patience_s: float, *, terminate_s: float = _TERMINATE_S, last: str = "redis", idle: Collection[str] = ()
    ) -> None:
        """End everything: wait `patience_s` for voluntary ends, then send SIGTERM, then SIGKILL.

        Args:
            terminate_s: From SIGTERM to SIGKILL.
            last: Name of the program that the others need until they have ended.
            idle: Names of programs that have no work to lose; they are killed at once.
        """
        self._ending.set()
        for name in self.children.keys() & set(idle):
            self.children[name].signal(signal.SIGKILL, with_children=True)
        others = [child for child in self.children.values() if child.name != last]
        await self._end_all(others, patience_s, terminate_s)
        await self._end_all([child for child in self.children.values() if child.name == last], 0.0, terminate_s)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.to_thread(self._sweep)

    async def _end_all(self, children: list[Child], patience_s: float, terminate_s: float) -> None:
        """Wait `patience_s` for voluntary ends, then send SIGTERM, and after `terminate_s` SIGKILL."""
        if await have_ended(children, patience_s):
            return
        for child in children:
            child.signal(signal.SIGTERM, with_children=False)
        if await have_ended(children, min(_QUIET_S, terminate_s)):
            return
        rest_s = max(0.0, terminate_s - _QUIET_S)
        names = ", ".join(child.name for child in children if child.is_running)
        self._say(f"waiting up to {rest_s:g} s for {names} to end")
        if await have_ended(children, rest_s):
            return
        for child in children:
            if child.is_running:
                self._say(f"{child.name} did not end within {terminate_s:g} s of SIGTERM; killing it")
                child.signal(signal.SIGKILL, with_children=True)
        await have_ended(children, _KILL_S)

    def kill(self) -> None:
        """End everything at once."""
        self._ending.set()
        for child in self.children.values():
            child.signal(signal.SIGKILL, with_children=True)
        self._sweep()

    def _sweep(self) -> None:
        """Let the guard kill all remaining processes, such as a grandchild that left its group."""
        guard, self._guard = self._guard, None
        if guard and guard.stdin:
            guard.stdin.close()
            try:
                guard.wait(timeout=_SWEEP_S)
            except subprocess.TimeoutExpired:
                self._say(f"the guard (process {guard.pid}) is still killing processes of the run")

    def _notify_guard(self, child: Child, sign: str = "") -> None:
        if self._guard and self._guard.stdin and child.session is not None:
            self._guard.stdin.write(f"{sign}{child.session}\n")

    async def _keep(self, child: Child) -> None:
        deaths, early, is_restart = 0, 0, False
        seen: set[ProcessFailure] = set()
        while not self._ending.is_set():
            await child.start(is_restart=is_restart)
            is_restart = True
            self._notify_guard(child)
            code = await child.wait()
            await child.end_rest()
            self._notify_guard(child, "-")
            if self._ending.is_set() or child.name in self._retired:
                return
            if child.program.ended:
                await child.program.ended()
            if code == EXIT_START_AGAIN:
                self._say(f"{child.name} starts again: {child.last_words()}")
                continue
            lived_s = time.monotonic() - child.started
            deaths = 1 if lived_s > STEADY_S else deaths + 1
            early = 1 if lived_s > _STARTED_S else early + 1
            if lived_s > STEADY_S:
                # A step does not become another one by the time that it takes to come to it.
                seen = {failure for failure in seen if failure.step is not None}
            await self._answer_death(child, code, deaths, early, seen)

    async def _answer_death(self, child: Child, code: int, deaths: int, early: int, seen: set[ProcessFailure]) -> None:
        """Wait before the restart, longer after each early death; or give up.

        Args:
            seen: The errors of its deaths before, to which this one's is added.

        Raises:
            ServiceRefusedError: It ended with exit code 2.
            RunError: It died too often, or of an error that it has died of before.
        """
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(early - 1, 10), _LONGEST_PAUSE_S)
        # A program that is done may have received the end of the run before this process.
        if code == 0 and await wait_until_set(self._ending, 2.0):
            return
        words, failure = child.last_words(), child.failure()
        if code == EXIT_BAD_INPUT:
            raise ServiceRefusedError(words.removeprefix("error: "), failure)
        if failure is not None and not failure.is_outside:
            if failure in seen:
                raise RunError(
                    f"{child.name} died twice of the same error, so a third start would not help.\n"
                    f"The error: {failure}\nIts log: {child.log}",
                    failure,
                )
            seen.add(failure)
        if deaths > self._max_restarts:
            times = "once" if deaths == 1 else f"{deaths} times"
            raise RunError(
                f"{child.name} died {times} ({child.describe_end(code)}; services.max_restarts is "
                f"{self._max_restarts}). Its last words: {words}\nIts log: {child.log}",
                failure,
            )
        # The last lines of a process that was killed from outside are not about its end.
        why = "" if -code in (signal.SIGKILL, signal.SIGTERM) else f": {words}"
        self._say(
            f"{child.name} died ({child.describe_end(code)}){why}. Starting it again in {pause_s:g} s "
            f"({deaths} of {self._max_restarts})"
        )
        await wait_until_set(self._ending, pause_s)


async def have_ended(children: Sequence[Child], timeout_s: float) -> bool:
    """Whether no child has a process, within so many seconds."""
    deadline = time.monotonic() + timeout_s
    while any(child.is_running for child in children):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.05)
    return True
