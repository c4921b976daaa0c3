"""The built-in environment `tools`, outside its sandbox: the end of a tool's process is its result.

The policy's code runs in a process of its own, which ends with the call, so episodes share no state. If a limit kills
the process, the reason is the tool's answer, from which the policy can learn.
"""

from __future__ import annotations

import time
from typing import Any

from gspo.reward.sandbox.calls import Answer, CallError, Question, Signature
from gspo.reward.sandbox.execution import Sandbox

# The tool whose calls run the policy's code.
_RUNS_CODE = "python"


class ToolEnvironment:
    """Answers the tool calls of a turn.

    Args:
        sandbox: Has builtins/tools.py loaded.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @property
    def signature(self) -> Signature:
        """That of an environment."""
        return self._sandbox.signature

    async def load(self) -> Signature:
        """Load the tools.

        Raises:
            CallError: They cannot be.
        """
        return await self._sandbox.load()

    async def call(self, question: Question, *, session: str | None = "") -> Answer:
        """Answer one question.

        Raises:
            CallError: It failed, and not because of the policy's code.
        """
        calls = _calls_of(question)
        if not any(call["name"] == _RUNS_CODE for call in calls):
            return await self._sandbox.call(question, session=session)
        started = time.perf_counter()
        try:
            return await self._sandbox.call(question, session=None)
        except CallError as error:
            if error.loading:
                raise
            content = f"error: {error}"
            messages = [{"role": "tool", "name": call["name"], "content": content} for call in calls]
            state = question["arguments"]["state"]
            return Answer([state, messages, 0.0, False], error.output, time.perf_counter() - started)

    async def close(self) -> None:
        """End the sandbox."""
        await self._sandbox.close()


def _calls_of(question: Question) -> list[dict[str, Any]]:
    action = question["arguments"].get("action")
    return action["calls"] if isinstance(action, dict) else []
