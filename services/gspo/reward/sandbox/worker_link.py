"""The service's end of one worker: it sends a question, and receives the reply and the printed output.

It checks the form of a reply alone: a frame in time, of a bounded size, under the question's id. values.py reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from gspo.reward.sandbox.calls import CallError, FailureKind
from gspo.reward.sandbox.inside.frames import HEAD_BYTES, FrameError, body_size, frame
from gspo.reward.sandbox.supervisor_link import SupervisorLink
from gspo.reward.sandbox.values import Reply, TooLargeError, read_reply

MAX_ANSWER_BYTES = 4 * 2**20
MAX_OUTPUT_BYTES = 4 * 2**20
OUTPUT_KEPT_BYTES = 16384
_CHUNK = 65536
_ID_BYTES = 8
# When a worker is inspected during a call: first after the one time, then after the other again and again.
FIRST_INSPECTION_S, INSPECTION_S = 0.05, 0.1
FORGED_REPLY = "its process wrote into the channel of results"


class WorkerGoneError(Exception):
    """The worker closed its channel without a reply."""


class WorkerTaintedError(Exception):
    """An earlier call made this worker unusable: it wrote into the channel. Ask another one."""


class WorkerLink(asyncio.Protocol):
    """One worker. It answers one question at a time.

    Attributes:
        supervisor: The link to the supervisor that started it.
        number: Its number with the supervisor.
        tainted: Whether it must answer no further call.
        session: The session that it has served; None before the first call.
        stopped: Whether the supervisor has stopped it, or is about to.
        inspected: Loop time of its last inspection while stopped.
        idle_since: Loop time of the end of its last call.
    """

    def __init__(self, supervisor: SupervisorLink, number: int, output: int) -> None:
        self.supervisor, self.number, self.tainted = supervisor, number, False
        self.session: str | None = None
        self.stopped, self.idle_since = False, 0.0
        self.inspected = asyncio.get_running_loop().time()
        self._output_fd = output
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._id, self._last_id = "", ""
        self._reply: asyncio.Future[Reply] | None = None
        self._inspections: asyncio.Task[None] | None = None
        self._tail, self._num_printed = b"", 0

    @classmethod
    async def start(cls, supervisor: SupervisorLink, memory_mb: int) -> WorkerLink:
        """A new worker, confined and without code.

        Raises:
            ConnectionError: The supervisor is gone.
        """
        channel, its_channel = socket.socketpair()
        output, its_output = os.pipe()
        try:
            number = supervisor.start_worker(memory_mb, its_channel.fileno(), its_output)
        except BaseException:
            channel.close()
            os.close(output)
            raise
        finally:
            its_channel.close()
            os.close(its_output)
        loop, link = asyncio.get_running_loop(), cls(supervisor, number, output)
        os.set_blocking(output, False)
        channel.setblocking(False)
        await loop.create_connection(lambda: link, sock=channel)
        loop.add_reader(output, link._read_output)
        return link

    async def ask(
        self, question: dict[str, Any], timeout_s: float, inspect: Callable[[], Coroutine[Any, Any, None]]
    ) -> Reply:
        """Send a question and wait for its reply.

        Args:
            inspect: Called again and again while the reply takes long; it may `fail` the call. The time limit does
                not wait for it.

        Raises:
            CallError: timeout, output_too_large, forbidden (a frame without a reply), or as `fail` was called.
            WorkerGoneError: The process ended.
            WorkerTaintedError: An earlier call made the worker unusable.
        """
        if self._transport is None or self._buffer:  # the bytes came before the question
            raise WorkerTaintedError
        loop = asyncio.get_running_loop()
        question_id = secrets.token_hex(_ID_BYTES)
        data = frame(question | {"id": question_id})
        self._last_id, self._id = self._id, question_id
        reply: asyncio.Future[Reply] = loop.create_future()
        self._reply = reply
        self._tail, self._num_printed = b"", 0
        self._transport.write(data)
        # A quick call costs two timers: a wait with a limit would cost more. Only a slow one gets a task.
        too_long = f"took longer than {timeout_s:g} s and was killed"
        deadline = loop.call_later(timeout_s, self.fail, "timeout", too_long)
        first_inspection = loop.call_later(FIRST_INSPECTION_S, self._start_inspections, inspect)
        try:
            return await reply
        except BaseException:  # its reply could still come, and would be taken for the next one's
            self.tainted = True
            raise
        finally:
            self._reply = None
            deadline.cancel()
            first_inspection.cancel()
            if self._inspections:
                self._inspections.cancel()
                self._inspections = None

    def _start_inspections(self, inspect: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def inspections() -> None:
            while True:
                await inspect()
                await asyncio.sleep(INSPECTION_S)

        self._inspections = asyncio.create_task(inspections(), name=f"inspect worker {self.number}")

    @property
    def alive(self) -> bool:
        return self._transport is not None

    @property
    def output(self) -> str:
        """The end of the output since the current call, or the last one, began."""
        self._read_output()
        return self._tail.decode(errors="replace")

    def fail(self, kind: FailureKind, text: str) -> None:
        """End the current call with a failure."""
        self._end(CallError(kind, text, output=self._tail.decode(errors="replace")))

    def close(self) -> None:
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
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a stream socket's
        self._transport = transport

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None
        self._end(WorkerGoneError())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._reply is None:
            self.tainted = True
            if self._transport:
                self._transport.pause_reading()
        elif len(self._buffer) >= HEAD_BYTES:
            self._read_frame()

    def _read_frame(self) -> None:
        size = body_size(self._buffer)
        end = HEAD_BYTES + size
        try:
            if size > MAX_ANSWER_BYTES:
                # No reply grows beyond any memory: such a size is something else in the channel.
                text = f"its answer has {size} bytes, and at most {MAX_ANSWER_BYTES} are read"
                raise TooLargeError(text) if size < 2**40 else FrameError(text)
            if len(self._buffer) < end:
                return
            head, body = self._buffer[:HEAD_BYTES], bytes(self._buffer[HEAD_BYTES:end])
            del self._buffer[:end]
            reply = read_reply(head, body)
            if reply.id not in (self._id, self._last_id):
                raise FrameError("a reply to no question")
        except FrameError:
            self.fail("forbidden", FORGED_REPLY)
            return
        except TooLargeError as error:
            self.fail("output_too_large", str(error))
            return
        if reply.id == self._last_id:
            self._end(WorkerTaintedError())
            return
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
