"""A process for one reward function: started clean, asked in frames, killed at its time limit, started again.

Prints of the user's code land in a pipe of their own and cannot become a result; a result is only what comes back on
the channel under the question's id. It keeps a careless function from harming the run; it is no prison for a hostile
one: network and files stay open. Neighbours: worker_process.py is the other end, scorer.py the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from services.reward import worker_process
from services.reward.calls import Answer, CallFailed, Code, FailureKind, Limits, Question
from services.reward.functions import Signature
from services.reward.values import describe
from services.reward.worker_process import HEAD_BYTES

# Importing what a function needs (torch, sympy) may take longer than a call.
LOAD_TIMEOUT_S = 120.0
# A kill takes effect at once unless the process sits in the kernel.
END_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 * 2**20
OUTPUT_KEPT_BYTES = 4096
KEPT_VARIABLES = ("PATH",)
KEPT_PREFIX = "PYTHON"
log = structlog.get_logger()


@dataclass
class CallCounts:
    """Calls of one function since the service's start."""

    results: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest_s: float = 0.0

    def add(self, result: str, seconds: float) -> None:
        """Count one call."""
        self.results[result] += 1
        self.seconds += seconds
        self.slowest_s = max(self.slowest_s, seconds)


class Sandbox:
    """One version of a user's code, loaded and warm."""

    def __init__(self, code: Code, limits: Limits) -> None:
        self.code, self.limits, self.counts = code, limits, CallCounts()
        self._signature: Signature | None = None
        self._process: _Process | None = None
        self._lock = asyncio.Lock()

    @property
    def signature(self) -> Signature:
        """What the function takes; known after `load`."""
        if self._signature is None:
            raise RuntimeError(f"{self.code.name} is not loaded")
        return self._signature

    async def load(self) -> Signature:
        """Start the process and load the code.

        Raises:
            CallFailed: The file raises, takes too long, or holds no function that can be called; `loading` is set.
        """
        async with self._lock:
            await self._ready()
        return self.signature

    async def call(self, question: Question, *, session: str = "") -> Answer:  # noqa: ARG002 - one process serves all
        """Answer one question; calls of other sessions see nothing of what this one leaves behind.

        Raises:
            CallFailed: It raised, took too long, or its process died; the next call finds a fresh process.
        """
        async with self._lock:
            process = await self._ready()
            started = time.perf_counter()
            result = "cancelled"
            try:
                values = await self._ask(process, question, self.limits.timeout_s)
                result = "ok"
            except CallFailed as error:
                result = error.kind
                seen = {"traceback": error.traceback, "output": error.output}
                log.warning("reward_call_failed", function=self.code.name, reason=str(error), **seen)
                raise
            finally:
                seconds = time.perf_counter() - started
                self.counts.add(result, seconds)
        return Answer(values["values"], process.output, seconds)

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._process.end()
            self._process = None

    async def _ready(self) -> _Process:
        if self._process is not None:
            return self._process
        self._process = await _Process.start(Path(self.code.filename).parent, self.limits.memory_mb)
        question = {"path": self.code.filename, "source": self.code.text, "entry": self.code.entry}
        try:
            answer = await self._ask(self._process, question, LOAD_TIMEOUT_S)
        except CallFailed as error:
            await self.close()
            error.loading, error.args = True, (f"cannot be loaded: {error}",)
            raise
        self._signature = Signature.from_answer(answer["signature"])
        return self._process

    async def _ask(self, process: _Process, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One question; a process that did not answer it properly is ended."""
        answered = False
        try:
            answer = await process.ask(question, timeout_s)
            answered = True
        except TimeoutError:
            text = f"took longer than {timeout_s:g} s and was killed"
            raise CallFailed("timeout", text, output=process.output) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            text = f"its process died ({_cause(await process.exit_code())}){_last(process.output)}"
            raise CallFailed("crash", text, output=process.output) from None
        except ValueError as error:  # not JSON, or not ours
            text = f"its process wrote into the channel of results: {error}"
            raise CallFailed("forbidden", text, output=process.output) from None
        finally:
            if not answered:
                self._process = None
                await process.end()
        if "error" in answer:
            raised = answer["error"]
            kind: FailureKind = "memory" if raised["type"] == "MemoryError" else "exception"
            detail = {"error_type": raised["type"], "traceback": raised["traceback"], "output": process.output}
            raise CallFailed(kind, describe(raised), **detail)
        return answer


def _cause(code: int | None) -> str:
    if code is None:
        return "it closed the channel"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last(output: str) -> str:
    lines = output.strip().splitlines()
    return f"; it last wrote: {lines[-1][:200]}" if lines else ""


class _Process:
    """One life of the process."""

    def __init__(self, process: asyncio.subprocess.Process, channel: _Channel, output: asyncio.StreamReader) -> None:
        self._process, self._channel = process, channel
        self._tail = b""
        self._listening = asyncio.create_task(self._listen(output))

    @classmethod
    async def start(cls, folder: Path, memory_mb: int) -> _Process:
        """Start the process in `folder`, in a group of its own."""
        here, there = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-u", worker_process.__file__),
                *(str(there.fileno()), str(memory_mb), str(os.getpid())),
                cwd=folder,
                env=clean_environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=(there.fileno(),),
                start_new_session=True,
            )
        finally:
            there.close()
            os.close(write_end)
        here.setblocking(False)
        return cls(process, await asyncio.open_connection(sock=here), await _read_pipe(read_end))

    async def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a question and read its answer.

        Raises:
            TimeoutError: None came in `timeout_s`.
            asyncio.IncompleteReadError, ConnectionError: The process is gone.
            ValueError: What came is not the answer to this question.
        """
        reader, writer = self._channel
        mark = secrets.token_hex(8)
        body = json.dumps({"id": mark, **question}).encode()
        async with asyncio.timeout(timeout_s):
            writer.write(len(body).to_bytes(HEAD_BYTES, "big") + body)
            await writer.drain()
            size = int.from_bytes(await reader.readexactly(HEAD_BYTES), "big")
            if size > MAX_ANSWER_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            answer = json.loads(await reader.readexactly(size))
        if not isinstance(answer, dict) or answer.get("id") != mark:
            raise ValueError("a frame without the question's id")
        return answer

    @property
    def output(self) -> str:
        """The end of what the user's code printed."""
        return self._tail.decode(errors="replace")

    async def exit_code(self) -> int | None:
        """How the process ended, given a moment to end; None while it lives."""
        await asyncio.wait({self._listening}, timeout=0.2)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 1.0)
        return self._process.returncode

    async def end(self) -> None:
        """Kill the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._channel[1].close()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        try:
            await asyncio.wait_for(self._process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            log.error("process_does_not_end", pid=self._process.pid, waited_s=END_TIMEOUT_S)

    async def _listen(self, output: asyncio.StreamReader) -> None:
        while chunk := await output.read(65536):
            self._tail = (self._tail + chunk)[-OUTPUT_KEPT_BYTES:]


_Channel = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _read_pipe(fd: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0))
    return reader


def clean_environment() -> dict[str, str]:
    """What user code may know of the service's environment: no tokens, no addresses."""
    return {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES or name.startswith(KEPT_PREFIX)}
