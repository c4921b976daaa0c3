"""The first process of each service: it checks the configuration, and may then wait to become the service itself.

All services check at the same time, and then import their libraries while others still check. A new process after the
check would import everything twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import uuid
from asyncio.subprocess import Process
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from gspo.cli.processes.exit_codes import RunError, ServiceRefusedError, describe_exit
from gspo.cli.processes.nodes import Nodes
from gspo.cli.processes.placement import NO_GPUS, Placement
from gspo.common.errors import EXIT_BAD_INPUT, WARNING
from gspo.common.host.module_command import SUPERVISOR_VARIABLE, module_command
from gspo.common.service.options import CHECKED, StartCommand
from gspo.common.streams.keys import COORDINATOR
from gspo.common.tasks import task_group

CHECK_TIMEOUT_S = 180.0


class PreflightProcess:
    """The first process of one service. Until it becomes the service, its output goes to a temporary file."""

    def __init__(
        self, service: str, command: tuple[str, ...], process: Process, parent_end: socket.socket, output: BinaryIO
    ):
        self.service, self.program = service, command[:4]
        self._process, self._socket, self._output = process, parent_end, output

    @classmethod
    async def start(cls, service: str, command: tuple[str, ...], environment: Mapping[str, str]) -> PreflightProcess:
        """Start it, as the leader of a session of its own."""
        parent_end, child_end = socket.socketpair()
        parent_end.setblocking(False)
        # `_close` closes the file: it stays open across several calls.
        output = tempfile.TemporaryFile()  # noqa: SIM115
        with child_end:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=child_end.fileno(),
                stdout=output,
                stderr=output,
                env={**environment},
                start_new_session=True,
            )
        return cls(service, command, process, parent_end, output)

    async def verdict(self) -> tuple[int, str]:
        """The exit code of the check, 0 if the process waits, and its output.

        Raises:
            RunError: It took longer than CHECK_TIMEOUT_S.
        """
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                code = await self._passed_or_ended()
        except TimeoutError as error:
            raise RunError(f"the check of {self.service} took longer than {CHECK_TIMEOUT_S:g} s") from error
        # Read by position: the process writes with the same offset, and may be writing.
        output = self._output.fileno()
        return code, os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace")

    async def _passed_or_ended(self) -> int:
        """Wait for either: after the process has ended, its children may still keep the connection open."""
        verdict = asyncio.get_running_loop().create_future()

        async def await_pass() -> None:
            if await asyncio.get_running_loop().sock_recv(self._socket, len(CHECKED)) and not verdict.done():
                verdict.set_result(0)

        async def await_end() -> None:
            code = await self._process.wait()
            if not verdict.done():
                verdict.set_result(code)

        async with task_group(await_pass(), await_end()):
            return int(await verdict)

    def become_service(self, command: tuple[str, ...], log: Path) -> Process | None:
        """Continue as the service with this command line; None if the process has ended, or is another program."""
        if self._process.returncode is not None or command[: len(self.program)] != self.program:
            self.end()
            return None
        line = StartCommand(command[len(self.program) :], str(log.resolve())).line()
        with contextlib.suppress(OSError):  # it has just died, which the caller sees when it waits
            self._socket.send(line)
        self._close()
        return self._process

    def end(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._close()

    def _close(self) -> None:
        self._socket.close()
        self._output.close()


class Preflight:
    """The first processes of all services; the block ends those that were not taken.

    Args:
        run_dir: Run directory of the services that they become; None for checks alone.
        nodes: Where the processes run; a check on a node ends, and its service is started anew.
        coordinator_options: Further options of the coordinator.

    Attributes:
        supervisor_id: The id of the later supervisor, which is in the environment of the processes.
    """

    def __init__(
        self, run_dir: Path | None = None, nodes: Nodes | None = None, coordinator_options: tuple[str, ...] = ()
    ) -> None:
        self.supervisor_id = uuid.uuid4().hex
        self._run_dir, self._nodes, self._coordinator_options = run_dir, nodes, coordinator_options
        self._processes: dict[str, PreflightProcess] = {}

    def __enter__(self) -> Preflight:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    async def check(self, service: str, config_file: Path, variables: Mapping[str, str]) -> tuple[int, str]:
        """Let the service's first process check a configuration; returns exit code and output.

        Args:
            variables: Environment variables beside those of this process.
        """
        name, command = f"{service}-0", check_command(service, config_file)
        command += self._coordinator_options if service == COORDINATOR else ()
        if self._nodes and (verdict := await self._nodes.check(name, command)) is not None:
            return verdict
        if self._run_dir is not None:
            # The process keeps this command line as the service, so name and run directory identify it.
            command += ("--wait", "--name", name, "--run-dir", str(self._run_dir))
        environment = {**os.environ, **variables, SUPERVISOR_VARIABLE: self.supervisor_id}
        process = self._processes[name] = await PreflightProcess.start(service, command, environment)
        return await process.verdict()

    def take(self, name: str) -> PreflightProcess | None:
        """The process of this name, which the caller then has to end; None if there is none."""
        return self._processes.pop(name, None) if self._run_dir is not None else None

    def end(self) -> None:
        """End all processes that were not taken."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()


async def check_services(
    services: tuple[str, ...],
    config_file: Path,
    placement: Placement = NO_GPUS,
    preflight: Preflight | None = None,
) -> list[str]:
    """Run the checks of all services at the same time; returns their warnings.

    Args:
        placement: Each check sees the GPUs of the service's first process.
        preflight: Keeps the processes of the checks; without one they end with their check.

    Raises:
        ServiceRefusedError: A service refuses the configuration; the first one in the order of `services`.
        RunError: A check failed or took longer than CHECK_TIMEOUT_S.
    """
    with contextlib.nullcontext(preflight) if preflight else Preflight() as processes:
        answers = await asyncio.gather(
            *(processes.check(service, config_file, placement.environment(f"{service}-0")) for service in services)
        )
    for service, (code, words) in zip(services, answers, strict=True):
        if code == EXIT_BAD_INPUT:
            raise ServiceRefusedError(_last_message(words).removeprefix("error: "))
        if code != 0:
            raise RunError(f"the check of {service} failed ({describe_exit(code)}): {_last_message(words)}")
    return [
        line.removeprefix(WARNING) for _, words in answers for line in words.splitlines() if line.startswith(WARNING)
    ]


def _last_message(output: str) -> str:
    """The message of the service, without the output of its libraries."""
    lines = [line for line in output.strip().splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith("error: "):
            return "\n".join(lines[number:])
    return "\n".join(lines[-8:]) or "it said nothing"


def check_command(service: str, config_file: Path) -> tuple[str, ...]:
    """The command line of a service's own check; the first four words are the program."""
    return (*module_command(f"gspo.{service}"), "--check", str(config_file))
