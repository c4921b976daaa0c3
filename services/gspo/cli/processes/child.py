"""A program of a run and its process: on this machine here, on a node of a cluster in gspo.cli.cluster.

supervisor.py starts and restarts them; it does not know where a process is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from abc import ABC, abstractmethod
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.cli.processes.exit_codes import describe_exit
from gspo.cli.processes.guard import kill_processes_of
from gspo.cli.processes.preflight import PreflightProcess
from gspo.common.service.failure import ProcessFailure

# As long as the last tracebacks of several ranks.
_TAIL_BYTES, _TAIL_LINES = 262_144, 8


@dataclass(frozen=True)
class Program:
    """A program of a run.

    Attributes:
        restart_options: Added to the command when it is started again after a death.
        environment: Variables beside those of the supervisor, at every start.
        preflight: A process that has checked the configuration and becomes its first one; None starts a new one.
        ended: Called after a death, when the process and its children have ended.
        place: Makes its child elsewhere than on this machine; None for a process of this machine.
    """

    name: str
    command: tuple[str, ...]
    restart_options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    preflight: PreflightProcess | None = None
    ended: Callable[[], Awaitable[None]] | None = None
    place: Callable[[Program, Path, Mapping[str, str]], Child] | None = None


class Child(ABC):
    """A program with at most one process at a time.

    Args:
        log_dir: Its standard output and error are appended to NAME.log there.
        variables: The supervisor's own variables for the process.

    Attributes:
        started: Time of the last start, on the monotonic clock.
        session: The session of its process on this machine, for the guard; None where it has none.
    """

    session: int | None = None

    def __init__(self, program: Program, log_dir: Path, variables: Mapping[str, str]) -> None:
        self.program, self.name, self.log = program, program.name, log_dir / f"{program.name}.log"
        self._variables = {**program.environment, **variables}
        self._log_starts: dict[Path, int] = {}
        self.started = 0.0

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether it has a process now."""

    @property
    def pid(self) -> int | None:
        """The id of its running process on this machine; None if it has none."""
        return self.session if self.is_running else None

    @abstractmethod
    async def start(self, *, is_restart: bool) -> None:
        """Start the process."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""

    @abstractmethod
    def signal(self, number: signal.Signals, *, with_children: bool) -> None:
        """Signal the process, unless it has ended; one that drains ends its own children."""

    @abstractmethod
    async def end_rest(self) -> None:
        """Kill the children that an ended process has left, such as an engine with all its memory."""

    def command(self, *, is_restart: bool) -> tuple[str, ...]:
        """The command line of the next start."""
        return self.program.command + (self.program.restart_options if is_restart else ())

    def describe_end(self, code: int) -> str:
        return describe_exit(code)

    def last_words(self) -> str:
        """The reason of its end, from its logs since its start: the last logged reason, else the last lines."""
        lines = self._last_lines()
        for line in _in_json(reversed(lines)):
            if reason := line.get("reason"):
                return str(reason)
        return "\n".join(lines[-_TAIL_LINES:]) or "it said nothing"

    def failure(self) -> ProcessFailure | None:
        """The error that ended it, from its logs since its start; None where they have none, as after SIGKILL.

        Of several ranks it is the first error; the others often end for want of that rank.
        """
        failures = []
        for line in _in_json(self._last_lines()):
            with contextlib.suppress(KeyError, TypeError):
                failures.append(ProcessFailure.from_log(line))
        return next((failure for failure in failures if not failure.is_outside), next(iter(failures), None))

    def _begin_logs(self, *logs: Path) -> None:
        """Note where the logs of this start begin."""
        self._log_starts = {log: log.stat().st_size if log.exists() else 0 for log in logs}

    def _last_lines(self) -> list[str]:
        lines: list[str] = []
        for log, start in self._log_starts.items():
            with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(start, size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
                lines += [line for line in text.splitlines() if line.strip()]
        return lines


class LocalChild(Child):
    """A program whose process is on this machine."""

    _process: Process | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, *, is_restart: bool) -> None:
        preflight = None if is_restart else self.program.preflight
        command = self.command(is_restart=is_restart)
        self._begin_logs(self.log)
        with self.log.open("ab") as log:
            process = preflight.become_service(command, self.log) if preflight else None
            self._process = process or await asyncio.create_subprocess_exec(
                *command,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._variables},
                start_new_session=True,
            )
        self.started = time.monotonic()
        self.session = self._process.pid

    async def wait(self) -> int:
        return await self._process.wait() if self._process else 0

    def signal(self, number: signal.Signals, *, with_children: bool) -> None:
        if self.is_running and self.session is not None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if with_children else os.kill)(self.session, number)

    async def end_rest(self) -> None:
        if self.session is not None:
            await asyncio.to_thread(kill_processes_of, "", (self.session,))


def _in_json(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The lines of a service's own log."""
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                yield record
