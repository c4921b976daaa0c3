"""The service's end of a supervisor: it sends commands, and receives the usage and the end of workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import structlog

from gspo.reward.sandbox.inside import scratch as scratch_folders
from gspo.reward.sandbox.inside.supervisor import PACKET_BYTES
from gspo.reward.sandbox.launch import ConfinementLevel, start_supervisor

# It imports the packages of the user's code, and torch takes its time on a busy machine.
START_TIMEOUT_S = 120.0
# A kill takes effect at once unless the process sits in the kernel.
END_TIMEOUT_S = 5.0
# Numbers of workers, never used twice in a process: a worker outlives its supervisor in no list.
_numbers = count(1)
log = structlog.get_logger()


@dataclass(frozen=True)
class WorkerUsage:
    """The resources that a worker has used."""

    cpu_s: float
    num_threads: int
    scratch_bytes: int
    watch_bytes: int


class SupervisorLink:
    """One supervisor, ready for commands.

    Args:
        control: The socket of its commands.
        scratch: Its scratch, if that is on disk.

    Attributes:
        report: Its own confinement: landlock (version), own_user; and failed_imports, the reason by package.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, control: socket.socket, scratch: Path | None = None
    ) -> None:
        self.report: dict[str, Any] = {}
        self._process, self._control, self._scratch = process, control, scratch
        self._ends: dict[int, asyncio.Future[int | None]] = {}
        self._measurements: dict[int, asyncio.Future[WorkerUsage | None]] = {}
        self._tickets = count(1)
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._receive)

    @classmethod
    async def start(
        cls, level: ConfinementLevel, reads: Sequence[Path], packages: Sequence[str], *, num_workers: int
    ) -> SupervisorLink:
        """Start a supervisor and wait until it takes commands; workers import the packages that it cannot.

        Raises:
            OSError: It did not start; the text is the last line that it wrote.
        """
        while True:
            link = cls(*await start_supervisor(level, reads, packages, num_workers=num_workers))
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    link.report = await link._ready
            except (ConnectionError, TimeoutError) as error:
                last_line = await link._last_line()
                await link.close()
                raise ConnectionError(last_line or f"it was not ready within {START_TIMEOUT_S:g} s") from error
            except BaseException:
                await link.close()
                raise
            if not (failed := link.report["failed_imports"]):
                return link
            # A failed import leaves half-made modules behind, which the user's own import would find.
            log.warning("preload_failed", reasons=failed, detail="the function's own processes import these themselves")
            await link.close()
            packages = [name for name in packages if name not in failed]

    @property
    def alive(self) -> bool:
        return self._control.fileno() >= 0

    def start_worker(self, memory_mb: int, channel: int, output: int) -> int:
        """Start a worker, confined and without code, on its ends of two descriptors; its number.

        Raises:
            ConnectionError: The supervisor is gone.
        """
        number = next(_numbers)
        self._send({"op": "start", "id": number, "memory": memory_mb * 2**20}, channel, output)
        self._ends[number] = asyncio.get_running_loop().create_future()
        return number

    async def measure(self, number: int, *, stop: bool = False) -> WorkerUsage | None:
        """The resources that a worker has used, after stopping it if `stop`; None if it is gone."""
        ticket, future = next(self._tickets), asyncio.get_running_loop().create_future()
        self._measurements[ticket] = future
        try:
            self._send({"op": "stop" if stop else "measure", "id": number, "ticket": ticket})
            done, _ = await asyncio.wait({future}, timeout=END_TIMEOUT_S)
            return future.result() if done else None
        except ConnectionError:
            return None
        finally:
            self._measurements.pop(ticket, None)

    def resume(self, number: int) -> None:
        with contextlib.suppress(ConnectionError):
            self._send({"op": "resume", "id": number})

    async def wait_end(self, number: int, timeout_s: float) -> int | None:
        """Exit code of a worker, negative for a signal; None if it has not ended, or the code is unknown."""
        done, _ = await asyncio.wait({self._ends[number]}, timeout=timeout_s)
        return done.pop().result() if done else None

    async def kill(self, number: int) -> None:
        """Kill a worker and wait until it is gone."""
        with contextlib.suppress(ConnectionError):
            self._send({"op": "kill", "id": number})
            if await self.wait_end(number, END_TIMEOUT_S) is None and self.alive:
                log.error("worker_does_not_end", waited_s=END_TIMEOUT_S)
        self._ends.pop(number, None)

    async def close(self) -> None:
        self._disconnect()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if self._scratch is not None:
            scratch_folders.remove(self._scratch)

    def _send(self, command: dict[str, Any], *descriptors: int) -> None:
        """Send a command, or keep it until the supervisor has read the earlier ones."""
        if not self.alive:
            raise ConnectionResetError("the supervisor is gone")
        data = json.dumps(command).encode()
        if not self._unsent and self._was_sent(data, descriptors):
            return
        self._unsent.append((data, [os.dup(fd) for fd in descriptors]))  # the caller closes its own
        asyncio.get_running_loop().add_writer(self._control.fileno(), self._send_kept)

    def _was_sent(self, data: bytes, descriptors: Sequence[int]) -> bool:
        try:
            socket.send_fds(self._control, [data], descriptors)
        except BlockingIOError:
            return False
        return True

    def _send_kept(self) -> None:
        try:
            while self._unsent and self._was_sent(*self._unsent[0]):
                for fd in self._unsent.popleft()[1]:
                    os.close(fd)
        except ConnectionError:
            self._disconnect()
            return
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._control.fileno())

    def _receive(self) -> None:
        try:
            data = self._control.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._disconnect()
            return
        message, result = json.loads(data), None
        future: asyncio.Future[Any] | None = self._ready
        if "ready" in message:
            result = message
        elif "ticket" in message:
            future = self._measurements.get(message["ticket"])
            result = WorkerUsage(**message["usage"]) if message["usage"] else None
        else:
            future, result = self._ends.get(message["id"]), os.waitstatus_to_exitcode(message["ended"])
        if future and not future.done():
            future.set_result(result)

    def _disconnect(self) -> None:
        if not self.alive:
            return
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        asyncio.get_running_loop().remove_writer(self._control.fileno())
        self._control.close()
        for fd in [fd for _, descriptors in self._unsent for fd in descriptors]:
            os.close(fd)
        self._unsent.clear()
        unanswered: list[asyncio.Future[Any]] = [*self._ends.values(), *self._measurements.values()]
        for future in unanswered:
            if not future.done():
                future.set_result(None)
        self._measurements.clear()
        if not self._ready.done():
            self._ready.set_exception(ConnectionResetError("the supervisor ended"))

    async def _last_line(self) -> str:
        if (stderr := self._process.stderr) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    return (await stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
        return ""
