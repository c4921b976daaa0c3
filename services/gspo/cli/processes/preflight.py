"""The first process of each service: it checks the configuration, and may then wait to become the service itself.

All of them check at the same time, and import what they need while others still check. Started again after a check,
each would import everything twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import uuid
from asyncio.subprocess import Process
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from gspo.cli.processes.exit_codes import RunError
from gspo.cli.processes.guard import SUPERVISOR_VARIABLE
from gspo.common.service.options import CHECKED, StartCommand
from gspo.common.service.tasks import end_tasks

CHECK_TIMEOUT_S = 180.0


def check_command(service: str, config_file: Path) -> tuple[str, ...]:
    """Command line of a service's own check; the first three words are the program."""
    return (sys.executable, "-m", f"gspo.{service}", "--check", str(config_file))


class PreflightProcess:
    """One such process. Its output goes to a file without a name until it has a log."""

    def __init__(self, service: str, command: tuple[str, ...], process: Process, ours: socket.socket, said: BinaryIO):
        self.service, self.program = service, command[:3]
        self._process, self._socket, self._said = process, ours, said

    @classmethod
    async def start(cls, service: str, command: tuple[str, ...], environment: Mapping[str, str]) -> PreflightProcess:
        """Start it, as the leader of a session of its own."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        # The file is closed with this object, whose life no block encloses.
        said = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=theirs.fileno(), stdout=said, stderr=said, env={**environment}, start_new_session=True
            )
        return cls(service, command, process, ours, said)

    async def verdict(self) -> tuple[int, str]:
        """The exit code of the check, 0 where the process waits, and what it said.

        Raises:
            RunError: It took longer than CHECK_TIMEOUT_S.
        """
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                code = await self._passed_or_ended()
        except TimeoutError as error:
            raise RunError(f"the check of {self.service} took longer than {CHECK_TIMEOUT_S:g} s") from error
        # Read by position: the process writes with the same offset, and may be writing.
        said = self._said.fileno()
        return code, os.pread(said, os.fstat(said).st_size, 0).decode(errors="replace")

    async def _passed_or_ended(self) -> int:
        """Both are waited for: what it has started may hold its end of the connection after it has ended."""
        passing = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._socket, len(CHECKED)))
        ending = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({passing, ending}, return_when=asyncio.FIRST_COMPLETED)
            return 0 if passing.done() and passing.result() else await ending
        finally:
            await end_tasks({passing, ending})

    def begin(self, command: tuple[str, ...], log: Path) -> Process | None:
        """Let it go on as the service with this command line; None where it has ended, or is another program."""
        if self._process.returncode is not None or command[: len(self.program)] != self.program:
            self.end()
            return None
        line = StartCommand(command[len(self.program) :], str(log.resolve())).line()
        with contextlib.suppress(OSError):  # it has just died: whoever waits for it sees that
            self._socket.send(line)
        self._close()
        return self._process

    def end(self) -> None:
        """Kill it, and what it has started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._close()

    def _close(self) -> None:
        self._socket.close()
        self._said.close()


class Preflight:
    """The first processes of all services; those that nobody has taken end with the block.

    Args:
        run_dir: Of the run for whose start they wait after a check that has found nothing; None for a check alone.

    Attributes:
        supervisor_id: The supervisor's supervisor_id, which they carry from the beginning.
    """

    def __init__(self, run_dir: Path | None = None) -> None:
        self.supervisor_id = uuid.uuid4().hex
        self._run_dir = run_dir
        self._processes: dict[str, PreflightProcess] = {}

    def __enter__(self) -> Preflight:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    async def check(self, service: str, config_file: Path, variables: Mapping[str, str]) -> tuple[int, str]:
        """Let the service's first process check a configuration: exit code, and what it said.

        Args:
            variables: Of its environment, beside this process's.
        """
        name = f"{service}-0"
        command = check_command(service, config_file)
        if self._run_dir is not None:
            # It keeps this command line as the service: whoever looks for a run's processes finds name and run in it.
            command += ("--wait", "--name", name, "--run-dir", str(self._run_dir))
        environment = {**os.environ, **variables, SUPERVISOR_VARIABLE: self.supervisor_id}
        process = self._processes[name] = await PreflightProcess.start(service, command, environment)
        return await process.verdict()

    def take(self, name: str) -> PreflightProcess | None:
        """The one of this name, for whoever starts the service; it is his to end."""
        return self._processes.pop(name, None) if self._run_dir is not None else None

    def end(self) -> None:
        """End all that have not been taken."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()
