"""A program of the run whose process is on a node of a Ray cluster, or has a part on each of several nodes."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.cli.cluster.reservations import Seat
from gspo.cli.processes.child import Child, Program
from gspo.common.errors import EXIT_START_AGAIN

# Makes sure that a program has places, and waits for them.
Seats = Callable[[str], Awaitable[Sequence[Seat]]]


class RayChild(Child):
    """A program in the actors of its bundles.

    Args:
        seats: Its places at each start.
        lost: Called with the seat of an actor that has died, for the reason in words.
        error: The class of Ray's errors.
    """

    def __init__(
        self,
        program: Program,
        log_dir: Path,
        variables: Mapping[str, str],
        seats: Seats,
        lost: Callable[[Seat], str],
        error: type[Exception],
    ) -> None:
        super().__init__(program, log_dir, {})
        del variables  # those of a guard on the driver's machine
        self._find_seats, self._describe_loss, self._error = seats, lost, error
        self._seats: Sequence[Seat] = ()
        self._is_running = False
        self._loss = self._leaves_for = ""

    @property
    def is_running(self) -> bool:
        return self._is_running

    async def start(self, *, is_restart: bool) -> None:
        self._seats, self._loss, self._leaves_for = await self._find_seats(self.name), "", ""
        # Over NFS, only one host may append to a file.
        logs = [self.log, *(self.log.with_suffix(f".{part}.log") for part in range(1, len(self._seats)))]
        self._begin_logs(*logs)
        command = self.command(is_restart=is_restart)
        self._is_running, self.started = True, time.monotonic()
        calls = (
            self._call(seat, "start", self.name, command, {**self._variables, **seat.variables}, str(log.resolve()))
            for seat, log in zip(self._seats, logs, strict=True)
        )
        await asyncio.gather(*calls)

    async def wait(self) -> int:
        """As for a process; the first part that fails ends the others."""
        waits = {asyncio.create_task(self._end_of(seat)) for seat in self._seats}
        try:
            codes: list[int] = []
            while waits and not any(codes):
                done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                codes += [task.result() for task in done]
            if waits:
                self.signal(signal.SIGKILL, with_children=True)
                await asyncio.wait(waits)
            return EXIT_START_AGAIN if self._leaves_for else next((code for code in codes if code), 0)
        finally:
            for task in waits:
                task.cancel()
            self._is_running = False

    async def _end_of(self, seat: Seat) -> int:
        code = None if self._loss else await self._call(seat, "wait", self.name)
        return -signal.SIGKILL if code is None else int(code)

    def leave(self, reason: str, number: signal.Signals) -> None:
        """Signal the process to end, and let it start again, which counts as no death."""
        self._leaves_for = reason
        self.signal(number, with_children=number == signal.SIGKILL)

    def signal(self, number: signal.Signals, *, with_children: bool) -> None:
        for seat in self._seats if self._is_running else ():
            seat.actor.signal.remote(self.name, int(number), with_children)

    def last_words(self) -> str:
        return self._leaves_for or super().last_words()

    async def end_rest(self) -> None:
        for seat in self._seats:
            await self._call(seat, "end_rest", self.name)

    def describe_end(self, code: int) -> str:
        return self._loss or super().describe_end(code)

    async def _call(self, seat: Seat, name: str, *arguments: Any) -> Any:
        """The reply of an actor; None if it has died, whose reason is kept."""
        try:
            return await getattr(seat.actor, name).remote(*arguments)
        except self._error as error:
            if cause := getattr(error, "cause", None):  # raised on the node, such as of a full disk
                self._loss = f"its node says: {cause}"
            else:
                self._loss = self._loss or self._describe_loss(seat)
            return None
