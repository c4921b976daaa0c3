"""The service's end of a supervisor: orders go out, what became of workers comes back.

It judges nothing.
"""

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

from gspo.reward.sandbox.inside.supervisor import PACKET_BYTES
from gspo.reward.sandbox.launch import ConfinementLevel, SupervisorProcess, start_supervisor
from gspo.reward.sandbox.worker_link import WorkerLink

# It imports what the user's code asks for, and torch takes its time on a busy machine.
START_TIMEOUT_S = 120.0
# A kill takes effect at once unless the process sits in the kernel.
END_TIMEOUT_S = 5.0
# Numbers of workers, never used twice in a process: a worker outlives its supervisor in no list.
_numbers = count(1)
log = structlog.get_logger()


class SupervisorStartError(Exception):
    """The supervisor did not come up; the text is the last that was said."""


@dataclass(frozen=True)
class WorkerUsage:
    """What a worker has used."""

    cpu_s: float
    num_threads: int
    scratch_bytes: int


class SupervisorLink:
    """One supervisor, ready for orders.

    Attributes:
        told: What it could do to confine itself: landlock (version), own_user, user_namespace; and failed_imports,
            by package why it could not be imported.
    """

    def __init__(self, started: SupervisorProcess) -> None:
        self.told: dict[str, Any] = {}
        self._started, self._control = started, started.control
        self._ends: dict[int, asyncio.Future[int | None]] = {}
        self._looks: dict[int, asyncio.Future[WorkerUsage | None]] = {}
        self._tickets = count(1)
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._hear)

    @classmethod
    async def start(
        cls, level: ConfinementLevel, reads: Sequence[Path], packages: Sequence[str], *, num_workers: int
    ) -> SupervisorLink:
        """Start a supervisor and wait until it takes orders; packages whose import fails there are left to the workers.

        Raises:
            SupervisorStartError: It did not come up.
        """
        link = await cls._start(level, reads, packages, num_workers)
        while failed := link.told["failed_imports"]:
            # A failed import leaves half-made modules behind, which the user's own import would meet.
            log.warning("preload_failed", reasons=failed, detail="the function's own processes import these themselves")
            await link.close()
            packages = [name for name in packages if name not in failed]
            link = await cls._start(level, reads, packages, num_workers)
        return link

    @classmethod
    async def _start(
        cls, level: ConfinementLevel, reads: Sequence[Path], packages: Sequence[str], num_workers: int
    ) -> SupervisorLink:
        try:
            link = cls(await start_supervisor(level, reads, packages, num_workers=num_workers))
        except OSError as error:
            raise SupervisorStartError(str(error)) from error
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await link._ready
        except (ConnectionError, TimeoutError) as error:
            said = await link._last_words()
            await link.close()
            raise SupervisorStartError(said or f"it was not ready within {START_TIMEOUT_S:g} s") from error
        except BaseException:
            await link.close()
            raise
        return link

    @property
    def alive(self) -> bool:
        """Whether it takes orders."""
        return self._control.fileno() >= 0

    async def start_worker(self, memory_mb: int) -> WorkerLink:
        """A new worker, confined and without code.

        Raises:
            ConnectionError: The supervisor is gone.
        """
        number = next(_numbers)
        here, there = socket.socketpair()
        read_end, write_end = os.pipe()
        order = {"op": "start", "id": number, "memory": memory_mb * 2**20}
        try:
            self._ends[number] = asyncio.get_running_loop().create_future()
            self._send(order, there.fileno(), write_end)
        except BaseException:
            here.close()
            os.close(read_end)
            raise
        finally:
            there.close()
            os.close(write_end)
        return await WorkerLink.open(number, here, read_end)

    async def look(self, number: int, *, stop: bool = False) -> WorkerUsage | None:
        """What a worker has used so far, after stopping it where asked; None where it is gone."""
        ticket, future = next(self._tickets), asyncio.get_running_loop().create_future()
        self._looks[ticket] = future
        try:
            self._send({"op": "stop" if stop else "look", "id": number, "ticket": ticket})
            done, _ = await asyncio.wait({future}, timeout=END_TIMEOUT_S)
            return future.result() if done else None
        except ConnectionError:
            return None
        finally:
            self._looks.pop(ticket, None)

    def resume(self, number: int) -> None:
        """Let a stopped worker go on."""
        with contextlib.suppress(ConnectionError):
            self._send({"op": "resume", "id": number})

    async def wait_end(self, number: int, timeout_s: float) -> int | None:
        """Exit code of a worker, negative for a signal; None where it lives on, or nobody can tell."""
        future = self._ends.get(number)
        if future is None:
            return None
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
        return future.result() if done else None

    async def kill(self, number: int) -> None:
        """Kill a worker and wait until it is gone; one of another supervisor is."""
        if number not in self._ends:
            return
        with contextlib.suppress(ConnectionError):
            self._send({"op": "kill", "id": number})
            if await self.wait_end(number, END_TIMEOUT_S) is None and self.alive:
                log.error("worker_does_not_end", waited_s=END_TIMEOUT_S)
        self._ends.pop(number, None)

    async def close(self) -> None:
        """End the supervisor and everything in it."""
        self._hang_up()
        process = self._started.process
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        self._started.remove()

    def _send(self, order: dict[str, Any], *descriptors: int) -> None:
        """Send an order, or keep it until the supervisor has read those before it."""
        if not self.alive:
            raise ConnectionResetError("the supervisor is gone")
        data = json.dumps(order).encode()
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
            self._hang_up()
            return
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._control.fileno())

    def _hear(self) -> None:
        try:
            data = self._control.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._hang_up()
            return
        told = json.loads(data)
        if "ready" in told:
            self.told = told
            if not self._ready.done():
                self._ready.set_result(None)
        elif "look" in told:
            future = self._looks.get(told["ticket"])
            if future and not future.done():
                future.set_result(WorkerUsage(**told["look"]) if told["look"] else None)
        elif (ended := self._ends.get(told["id"])) and not ended.done():
            ended.set_result(os.waitstatus_to_exitcode(told["ended"]))

    def _hang_up(self) -> None:
        if not self.alive:
            return
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        asyncio.get_running_loop().remove_writer(self._control.fileno())
        self._control.close()
        for fd in [fd for _, descriptors in self._unsent for fd in descriptors]:
            os.close(fd)
        self._unsent.clear()
        unanswered: list[asyncio.Future[Any]] = [*self._ends.values(), *self._looks.values()]
        for future in unanswered:
            if not future.done():
                future.set_result(None)
        self._looks.clear()
        if not self._ready.done():
            self._ready.set_exception(ConnectionResetError("the supervisor ended"))

    async def _last_words(self) -> str:
        stderr = self._started.process.stderr
        if stderr is None:
            return ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                said = await stderr.read()
            return said.decode(errors="replace").strip().rpartition("\n")[2]
        return ""
