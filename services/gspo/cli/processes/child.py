"""One child process: its command, its log file, its signals, its last words. supervisor.py decides about restarts.

Every child leads a session of its own: Ctrl-C in the terminal reaches only the command line, and a signal to the child
reaches its own children too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gspo.cli.processes.preflight import PreflightProcess

_TAIL_BYTES = 32_768
_TAIL_LINES = 8


@dataclass(frozen=True)
class Program:
    """A program of a run.

    Attributes:
        restart_options: Added to the command when it is started again after a death.
        environment: Variables beside those of the supervisor, at every start.
        preflight: A process that has checked the configuration and becomes its first one; None starts a new one.
    """

    name: str
    command: tuple[str, ...]
    restart_options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    preflight: PreflightProcess | None = None


class Child:
    """A program with at most one process at a time.

    Args:
        log_dir: Its standard output and error are appended to NAME.log there.
        environment: The whole environment of the process.
    """

    def __init__(self, program: Program, log_dir: Path, environment: dict[str, str]) -> None:
        self.program, self.log = program, log_dir / f"{program.name}.log"
        self._environment = environment
        self._process: Process | None = None
        self._log_start = 0
        self.started = 0.0

    @property
    def name(self) -> str:
        """The program's name."""
        return self.program.name

    @property
    def pid(self) -> int | None:
        """The id of the running process; None if there is none."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self, *, is_restart: bool) -> int:
        """Start the process; returns the id of its session."""
        preflight = None if is_restart else self.program.preflight
        command = self.program.command + (self.program.restart_options if is_restart else ())
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            process = preflight.become_service(command, self.log) if preflight else None
            self._process = process or await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        self.started = time.monotonic()
        return self._process.pid

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        return await self._process.wait() if self._process else 0

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and its children, unless it has ended."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to drain; it ends its own children."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def last_words(self) -> str:
        """The reason of its end, from its log since its start: the last logged reason, else the last lines."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        for line in reversed(lines):
            if reason := _logged_reason(line):
                return reason
        return "\n".join(lines[-_TAIL_LINES:]) or "it said nothing"


def _logged_reason(line: str) -> str:
    """The reason of a JSON log line; empty for any other line."""
    if not line.startswith("{"):
        return ""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return ""
    return str(entry["reason"]) if isinstance(entry, dict) and entry.get("reason") else ""
