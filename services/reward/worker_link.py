"""The service's end of one worker: a question goes out, an answer comes back, and so does what was printed.

What comes from a worker is checked for its form alone: a frame in time, of a bearable size, JSON, under the question's
id. sandbox.py judges the rest. Neighbours: inside/worker.py is the other end, supervisor_link.py makes workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from services.reward.calls import CallFailed, FailureKind
from services.reward.inside.frames import HEAD_BYTES, NoFrame, body_size, frame, is_msgpack, read
from services.reward.values import whole_text

MAX_ANSWER_BYTES = 4 * 2**20
MAX_OUTPUT_BYTES = 4 * 2**20
OUTPUT_KEPT_BYTES = 16384
_CHUNK = 65536
# So many questions may be in a worker's channel: behind quick ones others wait there, so that neither end stands still
# between two calls. A call is not to wait longer than this time for those before it, by what the last one took.
MAX_QUESTIONS, MAX_WAIT_S = 8, 0.005
_MARK_CHARS, _MARKS_AT_A_TIME = 16, 64
# A call that takes longer is looked at, first after this time and then again and again.
FIRST_LOOK_S, LOOK_S = 0.05, 0.1
# One that never rests is looked at all the same, however quick its calls are.
BUSY_LOOK_S = 0.25


class WorkerGone(Exception):  # noqa: N818 - a fact about a process
    """The worker closed its channel without an answer."""


class Spoiled(Exception):  # noqa: N818 - a fact about another call
    """Another call made this worker useless: it wrote into the channel, or it was ended with it. Ask elsewhere."""


def _new_marks() -> Iterator[str]:
    """Marks that nobody can guess; the kernel is asked for many at a time."""
    while True:
        drawn = secrets.token_hex(_MARK_CHARS // 2 * _MARKS_AT_A_TIME)
        yield from (drawn[start : start + _MARK_CHARS] for start in range(0, len(drawn), _MARK_CHARS))


@dataclass
class _Call:
    """A question under way."""

    mark: str
    timeout_s: float
    answer: asyncio.Future[dict[str, Any]]


_marks = _new_marks()


class WorkerLink(asyncio.Protocol):
    """One worker. It answers one question after another; further ones may wait in its channel meanwhile.

    Attributes:
        number: Its number with the supervisor.
        spoiled: Whether it is to answer no further call.
        used_s: Processor time it had used before the call under way, where the caller asked.
        on_slow: Called with a call's mark while it takes long, again and again, and now and then while calls follow
            each other.
    """

    def __init__(self, number: int, output: int) -> None:
        self.number, self.spoiled = number, False
        self._output_fd = output
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._calls: deque[_Call] = deque()
        self._unsent: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._began, self._deadline, self._last_s = 0.0, 0.0, math.inf
        self.on_slow: Callable[[str], None] | None = None
        self._looked, self._last_mark = asyncio.get_running_loop().time(), ""
        self.used_s = 0.0
        self._tail, self._num_printed = b"", 0

    @classmethod
    async def open(cls, number: int, channel: socket.socket, output: int) -> WorkerLink:
        """Take over the service's ends of a worker's channel and output."""
        loop = asyncio.get_running_loop()
        link = cls(number, output)
        os.set_blocking(output, False)
        channel.setblocking(False)
        await loop.create_connection(lambda: link, sock=channel)
        loop.add_reader(output, link._read_output)
        return link

    async def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a question and wait for its answer; its time begins when those before it are answered.

        Raises:
            CallFailed: timeout, output_too_large, forbidden (a frame that is no answer), or what `fail` was given.
            WorkerGone: The process ended.
            Spoiled: The worker cannot be used any more, and not because of this question.
        """
        if self._transport is None or (self._buffer and not self._calls):  # what is there was said before it was asked
            raise Spoiled
        loop = asyncio.get_running_loop()
        call = _Call(next(_marks), timeout_s, loop.create_future())
        asked = frame(question | {"id": call.mark})
        self._calls.append(call)
        if len(self._calls) == 1:
            self._begin(call)
            self._transport.write(asked)
        else:  # it has to wait anyway: those that come at the same time are sent together
            if not self._unsent:
                loop.call_soon(self._send)
            self._unsent.append(asked)
        try:
            return await call.answer
        finally:
            if call in self._calls:  # it was given up, and its answer would come for the next one
                self.spoiled = True

    @property
    def alive(self) -> bool:
        """Whether its channel is open."""
        return self._transport is not None

    def takes_another(self, num_calls: int) -> bool:
        """Whether one more question may wait in its channel behind those of `num_calls`: few, and quick ones."""
        quick = num_calls < MAX_QUESTIONS and num_calls * self._last_s < MAX_WAIT_S
        return quick and self.alive and not self.spoiled

    def fail(self, kind: FailureKind, text: str, mark: str | None = None) -> None:
        """End the call under way with a failure; with a mark, only if it is that call."""
        if mark is not None and not (self._calls and self._calls[0].mark == mark):
            return
        error = CallFailed(kind, text)
        error.output = self._tail.decode(errors="replace")
        self._end(error)

    @property
    def output(self) -> str:
        """The end of what was printed since the call under way, or the last one, began."""
        self._read_output()
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        """Close the channel and the output; questions that wait are to be asked elsewhere."""
        self._end(Spoiled())
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        if self._output_fd >= 0:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                asyncio.get_running_loop().remove_reader(self._output_fd)
            os.close(self._output_fd)
            self._output_fd = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a stream socket's
        self._transport = transport

    def connection_lost(self, _exc: Exception | None) -> None:
        """Called by the loop."""
        self._transport = None
        self._end(WorkerGone())

    def _send(self) -> None:
        asked, self._unsent = b"".join(self._unsent), []
        if self._transport is not None:
            self._transport.write(asked)

    def _begin(self, call: _Call) -> None:
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._deadline = self._began + call.timeout_s
        if self._timer is None:  # one timer serves many quick calls
            self._timer = loop.call_later(min(FIRST_LOOK_S, call.timeout_s), self._tick)
        self._tail, self._num_printed = b"", 0

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._buffer += data
        self._read_frame()

    def _read_frame(self) -> None:
        if len(self._buffer) < HEAD_BYTES:
            return
        size = body_size(self._buffer)
        if size > MAX_ANSWER_BYTES:
            # A size beyond any memory is no answer that grew too large but something else in the channel.
            kind: FailureKind = "output_too_large" if size < 2**40 else "forbidden"
            text = f"its answer has {size} bytes, and at most {MAX_ANSWER_BYTES} are read"
            self.fail(kind, text if kind == "output_too_large" else "its process wrote into the channel of results")
            return
        if not self._calls and len(self._buffer) > MAX_ANSWER_BYTES + HEAD_BYTES and self._transport:
            self._transport.pause_reading()
        if not self._calls or len(self._buffer) < HEAD_BYTES + size:
            return
        head, body = self._buffer[:HEAD_BYTES], bytes(self._buffer[HEAD_BYTES : HEAD_BYTES + size])
        del self._buffer[: HEAD_BYTES + size]
        try:
            answer = read(head, body)
            answer = answer if is_msgpack(head) else whole_text(answer)
        except (NoFrame, RecursionError):
            answer = None
        self._take(answer)

    def _take(self, answer: Any) -> None:
        mark = answer.get("id") if isinstance(answer, dict) else None
        call = self._calls[0]
        if mark == call.mark:
            self._finish(call, answer)
        elif mark is not None and mark == self._last_mark:
            self._end(Spoiled())
        else:
            self.fail("forbidden", "its process wrote into the channel of results")

    def _finish(self, call: _Call, answer: dict[str, Any]) -> None:
        self._read_output()
        answer["output"] = self._tail.decode(errors="replace")
        self._calls.popleft()
        self._last_mark, self._last_s = call.mark, asyncio.get_running_loop().time() - self._began
        if not call.answer.done():
            call.answer.set_result(answer)
        if answer.get("threads_left"):  # none of them may go on in a call that waits behind
            self._end(Spoiled())
        elif self._calls:
            self._begin(self._calls[0])
            self._read_frame()

    def _tick(self) -> None:
        """The call under way is late, or slow, or neither."""
        loop = asyncio.get_running_loop()
        self._timer, now = None, loop.time()
        if not self._calls:
            return
        call = self._calls[0]
        if now >= self._deadline:
            self.fail("timeout", f"took longer than {call.timeout_s:g} s and was killed")
            return
        if self.on_slow and (now - self._began >= FIRST_LOOK_S / 2 or now - self._looked >= BUSY_LOOK_S):
            self._looked = now
            self.on_slow(call.mark)
        self._timer = loop.call_at(min(now + LOOK_S, self._deadline), self._tick)

    def _end(self, error: Exception) -> None:
        """End the call under way with an error; those that wait are to be asked elsewhere."""
        self.spoiled = True
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while self._calls:
            call = self._calls.popleft()
            if not call.answer.done():
                call.answer.set_exception(error)
            error = Spoiled()

    def _read_output(self) -> None:
        if self._output_fd < 0:
            return
        try:
            chunk = os.read(self._output_fd, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            asyncio.get_running_loop().remove_reader(self._output_fd)
            return
        self._tail = (self._tail + chunk)[-OUTPUT_KEPT_BYTES:]
        self._num_printed += len(chunk)
        if self._num_printed > MAX_OUTPUT_BYTES:
            self.fail("output_too_large", f"printed more than {MAX_OUTPUT_BYTES} bytes and was killed")
