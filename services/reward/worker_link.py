"""The service's end of one worker: a question goes out, an answer comes back, and so does what was printed.

What comes from a worker is checked for its form alone: a frame in time, of a bearable size, JSON, under the question's
id. sandbox.py judges the rest. Neighbours: inside/worker.py is the other end, supervisor_link.py makes workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from typing import Any

from services.reward.calls import CallFailed, FailureKind
from services.reward.inside.worker import HEAD_BYTES

MAX_ANSWER_BYTES = 4 * 2**20
MAX_OUTPUT_BYTES = 4 * 2**20
OUTPUT_KEPT_BYTES = 16384
_CHUNK = 65536
_encode, _decode = json.JSONEncoder(separators=(",", ":")).encode, json.JSONDecoder().decode


class WorkerGone(Exception):  # noqa: N818 - a fact about a process
    """The worker closed its channel without an answer."""


class StaleAnswer(Exception):  # noqa: N818 - a fact about a frame
    """Something came that answers no question, or an earlier one again: an earlier call wrote into the channel."""


class WorkerLink(asyncio.Protocol):
    """One worker; one question at a time.

    Attributes:
        number: Its number with the supervisor.
    """

    def __init__(self, number: int, output: int) -> None:
        self.number = number
        self._output_fd = output
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._mark = self._last_mark = ""
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
        """Send a question and wait for its answer.

        Raises:
            CallFailed: timeout, output_too_large, forbidden (a frame that is no answer), or what `fail` was given.
            WorkerGone: The process ended.
            StaleAnswer: The answer is another question's; the worker cannot be used any more.
        """
        loop = asyncio.get_running_loop()
        if self._transport is None:
            raise WorkerGone
        if self._buffer:  # said before it was asked
            raise StaleAnswer
        self._answer = loop.create_future()
        self._last_mark, self._mark = self._mark, secrets.token_hex(8)
        self._tail, self._num_printed = b"", 0
        body = _encode(question | {"id": self._mark}).encode()
        timer = loop.call_later(timeout_s, self.fail, "timeout", f"took longer than {timeout_s:g} s and was killed")
        try:
            self._transport.write(len(body).to_bytes(HEAD_BYTES, "big") + body)
            return await self._answer
        finally:
            timer.cancel()
            self._answer = None

    @property
    def alive(self) -> bool:
        """Whether its channel is open."""
        return self._transport is not None

    def fail(self, kind: FailureKind, text: str) -> None:
        """End the call under way with a failure."""
        self._end(CallFailed(kind, text))

    @property
    def output(self) -> str:
        """The end of what was printed since the last question."""
        self._read_output()
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        """Close the channel and the output."""
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

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._buffer += data
        self._read_frame()

    def _read_frame(self) -> None:
        if len(self._buffer) < HEAD_BYTES:
            return
        size = int.from_bytes(self._buffer[:HEAD_BYTES], "big")
        if size > MAX_ANSWER_BYTES:
            # A size beyond any memory is no answer that grew too large but something else in the channel.
            kind: FailureKind = "output_too_large" if size < 2**40 else "forbidden"
            text = f"its answer has {size} bytes, and at most {MAX_ANSWER_BYTES} are read"
            self.fail(kind, text if kind == "output_too_large" else "its process wrote into the channel of results")
            return
        if self._answer is None and len(self._buffer) > MAX_ANSWER_BYTES + HEAD_BYTES and self._transport:
            self._transport.pause_reading()
        if self._answer is None or len(self._buffer) < HEAD_BYTES + size:
            return
        body = bytes(self._buffer[HEAD_BYTES : HEAD_BYTES + size])
        del self._buffer[: HEAD_BYTES + size]
        self._take(body)

    def _take(self, body: bytes) -> None:
        try:
            answer = _decode(body.decode())
        except (ValueError, RecursionError):  # not UTF-8, not JSON, or too deep
            answer = None
        mark = answer.get("id") if isinstance(answer, dict) else None
        if mark == self._mark and self._answer and not self._answer.done():
            self._answer.set_result(answer)
        elif mark is not None and mark == self._last_mark:
            self._end(StaleAnswer())
        else:
            self.fail("forbidden", "its process wrote into the channel of results")

    def _end(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

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
