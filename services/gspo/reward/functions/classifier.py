"""The built-in `reward_model`: a Hugging Face sequence-classification model scores each answer.

This module starts and calls its process, whose program, with torch, is builtins/reward_model.py. A call that takes
too long ends the process, and the next call starts it again.
"""

import asyncio
import contextlib
import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from gspo.common.config.fields import Section
from gspo.reward.sandbox.calls import Answer, CallError, Question, Signature

PROGRAM = Path(__file__).parent / "builtins/reward_model.py"
LOAD_TIMEOUT_S, END_TIMEOUT_S = 300.0, 10.0
MAX_LINE_BYTES = 8 * 2**20


class ClassifierOptions(Section):
    """`args` of the built-in."""

    model: str
    device: str = ""
    max_length: PositiveInt = 4096
    batch_size: PositiveInt = 8


class ClassifierProcess:
    """The process with the model.

    Args:
        timeout_s: Longest that one call may take.
    """

    signature = Signature("reward_model", "trl", frozenset({"prompts", "completions"}), (), takes_any=False)

    def __init__(self, options: ClassifierOptions, *, timeout_s: float) -> None:
        self._options, self._timeout_s = options, timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=20)
        self._lock = asyncio.Lock()

    async def load(self) -> Signature:
        """Start the process and load the model.

        Raises:
            CallError: It cannot be loaded.
        """
        async with self._lock:
            await self._ready()
        return self.signature

    async def call(self, question: Question, *, session: str | None = "") -> Answer:  # noqa: ARG002 - it has no state
        """The scores of one batch.

        Raises:
            CallError: The process failed or took too long.
        """
        arguments = question["arguments"]
        pairs = zip(arguments["prompts"], arguments["completions"], strict=True)
        conversations = [_messages(prompt, "user") + _messages(text, "assistant") for prompt, text in pairs]
        async with self._lock:
            reply = await self._ask(await self._ready(), {"conversations": conversations}, self._timeout_s)
        return Answer(reply["scores"])

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._process is not None:
            return self._process
        options = json.dumps(self._options.model_dump())
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(PROGRAM), options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
        )
        self._lines.clear()
        self._listening = asyncio.create_task(self._listen(self._process.stderr))
        try:
            await self._ask(self._process, None, LOAD_TIMEOUT_S)
        except CallError as error:
            error.loading = True
            raise
        return self._process

    async def _ask(self, process: asyncio.subprocess.Process, body: Any, timeout_s: float) -> Any:
        """One line in and one out; a process that does not answer is ended."""
        answered = False
        assert process.stdin is not None and process.stdout is not None  # noqa: S101 - both are pipes
        try:
            async with asyncio.timeout(timeout_s):
                if body is not None:
                    process.stdin.write(json.dumps(body).encode() + b"\n")
                    await process.stdin.drain()
                line = await process.stdout.readline()
            if not line:
                raise CallError("crash", f"the reward model's process ended: {await self._last_lines(process)}")
            answered = True
            return json.loads(line)
        except TimeoutError:
            raise CallError("timeout", f"the reward model took longer than {timeout_s:g} s") from None
        except (ConnectionError, ValueError) as error:
            raise CallError("crash", f"the reward model's process failed: {error}") from error
        finally:
            if not answered:
                await self.close()

    async def _listen(self, stderr: asyncio.StreamReader | None) -> None:
        while stderr and (chunk := await stderr.read(65536)):
            self._lines.extend(line for line in chunk.decode(errors="replace").splitlines() if line.strip())

    async def _last_lines(self, process: asyncio.subprocess.Process) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        if self._listening is not None:
            await asyncio.wait({self._listening}, timeout=1.0)
        missing = any("No module named 'torch'" in line for line in self._lines)
        return "it needs torch: pip install gspo[reward-model]" if missing else " ".join(list(self._lines)[-2:])

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        if self._listening is not None:
            self._listening.cancel()


def _messages(value: Any, role: str) -> list[dict[str, str]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)
