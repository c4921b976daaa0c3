"""The service's end of one worker: a question goes out, its answer comes back, and so does what was printed.

What comes from a worker is checked for its form alone: a frame in time, of a bearable size, a reply, under the
question's id. sandbox.py judges the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

from gspo.reward.sandbox.calls import CallError, FailureKind
from gspo.reward.sandbox.inside.frames import HEAD_BYTES, FrameError, body_size, frame
from gspo.reward.sandbox.replies import Reply, TooLargeError, read_reply

MAX_ANSWER_BYTES = 4 * 2**20
MAX_OUTPUT_BYTES = 4 * 2**20
OUTPUT_KEPT_BYTES = 16384
_CHUNK = 65536
_ID_BYTES = 8
# A call that takes longer is looked at, first after this time and then again and again.
FIRST_LOOK_S, LOOK_S = 0.05, 0.1
_WROTE = "its process wrote into the channel of results"


class WorkerGoneError(Exception):
    """The worker closed its channel without an answer."""


class WorkerTaintedError(Exception):
    """An earlier call made this worker useless: it wrote into the channel. Ask another one."""


class WorkerLink(asyncio.Protocol):
    """One worker. It answers one question at a time.

    Attributes:
        number: Its number with the supervisor.
        tainted: Whether it is to answer no further call.
        used_s: Processor time it had used before the call under way, where the caller asked.
        session: Whom it has served; None: nobody.
        stopped: Whether the supervisor was told to stop it.
        inspected: Loop time at which it was last looked at while stopped.
        idle_since: Loop time at which it was last given back.
    """

    def __init__(self, number: int, output: int) -> None:
        self.number, self.tainted, self.used_s = number, False, 0.0
        self.session: str | None = None
        self.stopped, self.idle_since = False, 0.0
        self.inspected = asyncio.get_running_loop().time()
        self._output_fd = output
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._id, self._last_id = "", ""
        self._reply: asyncio.Future[Reply] | None = None
        self._timer: asyncio.TimerHandle | None = None
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

    async def ask(self, question: dict[str, Any], timeout_s: float, on_slow: Callable[[], None] | None = None) -> Reply:
        """Send a question and wait for its answer.

        Args:
            on_slow: Called again and again while the answer takes long.

        Raises:
            CallError: timeout, output_too_large, forbidden (a frame that is no answer), or what `fail` was given.
            WorkerGoneError: The process ended.
            WorkerTaintedError: The worker cannot be used any more, and not because of this question.
        """
        if self._transport is None or self._buffer:  # what is there was said before it was asked
            raise WorkerTaintedError
        loop = asyncio.get_running_loop()
        question_id = secrets.token_hex(_ID_BYTES)
        asked = frame(question | {"id": question_id})
        self._id, self._reply = question_id, loop.create_future()
        self._tail, self._num_printed = b"", 0
        self._transport.write(asked)
        deadline = loop.time() + timeout_s
        self._timer = loop.call_at(min(loop.time() + FIRST_LOOK_S, deadline), self._tick, deadline, timeout_s, on_slow)
        try:
            return await self._reply
        except BaseException:  # its answer could still come, and would be taken for the next one's
            self.tainted = True
            raise
        finally:
            if self._timer:
                self._timer.cancel()
            self._last_id, self._reply = self._id, None

    def _tick(self, deadline: float, timeout_s: float, on_slow: Callable[[], None] | None) -> None:
        """The call under way is slow, or late."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now >= deadline:
            self.fail("timeout", f"took longer than {timeout_s:g} s and was killed")
            return
        if on_slow:
            on_slow()
        self._timer = loop.call_at(min(now + LOOK_S, deadline), self._tick, deadline, timeout_s, on_slow)

    @property
    def alive(self) -> bool:
        """Whether its channel is open."""
        return self._transport is not None

    @property
    def asked(self) -> str:
        """The question that it is answering; empty where there is none."""
        return self._id if self._reply else ""

    @property
    def output(self) -> str:
        """The end of what was printed since the call under way, or the last one, began."""
        self._read_output()
        return self._tail.decode(errors="replace")

    def fail(self, kind: FailureKind, text: str) -> None:
        """End the call under way with a failure."""
        self._end(CallError(kind, text, output=self._tail.decode(errors="replace")))

    def close(self) -> None:
        """Close the channel and the output."""
        self._end(WorkerGoneError())
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
        self._end(WorkerGoneError())

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._buffer += data
        if self._reply is None:
            self.tainted = True
            if self._transport:
                self._transport.pause_reading()
        elif len(self._buffer) >= HEAD_BYTES:
            self._read_frame()

    def _read_frame(self) -> None:
        size = body_size(self._buffer)
        if size > MAX_ANSWER_BYTES:
            # A size beyond any memory is no answer that grew too large but something else in the channel.
            if size < 2**40:
                text = f"its answer has {size} bytes, and at most {MAX_ANSWER_BYTES} are read"
                self.fail("output_too_large", text)
            else:
                self.fail("forbidden", _WROTE)
            return
        end = HEAD_BYTES + size
        if len(self._buffer) < end:
            return
        head, body = self._buffer[:HEAD_BYTES], bytes(self._buffer[HEAD_BYTES:end])
        del self._buffer[:end]
        try:
            reply = read_reply(head, body)
        except FrameError:
            self.fail("forbidden", _WROTE)
            return
        except TooLargeError as error:
            self.fail("output_too_large", str(error))
            return
        if reply.id == self._id:
            self._take(reply)
        elif reply.id == self._last_id:
            self._end(WorkerTaintedError())
        else:
            self.fail("forbidden", _WROTE)

    def _take(self, reply: Reply) -> None:
        reply.output = self.output
        if reply.threads_left:  # none of them may go on in the next call
            self.tainted = True
        if self._reply and not self._reply.done():
            self._reply.set_result(reply)

    def _end(self, error: Exception) -> None:
        self.tainted = True
        if self._reply and not self._reply.done():
            self._reply.set_exception(error)

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
