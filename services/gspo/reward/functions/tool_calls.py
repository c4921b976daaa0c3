"""The built-in environment `tools`, seen from outside its sandbox: what a call does to its process is its result.

Code that the policy wrote runs in a process of its own, which ends with the call, so that no episode sees what another
left behind; and when it is killed by a limit, that is the tool's answer, from which the policy can learn.
"""

from __future__ import annotations

import time
from typing import Any

from gspo.reward.sandbox.calls import Answer, CallError, Question, Signature
from gspo.reward.sandbox.execution import Sandbox

# A tool whose calls run what the policy wrote.
_RUNS_CODE = "python"


class ToolEnvironment:
    """Answers the calls of a turn.

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
            CallError: It failed, and not by what the policy wrote.
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
            said = f"error: {error}"
            messages = [{"role": "tool", "name": call["name"], "content": said} for call in calls]
            state = question["arguments"]["state"]
            return Answer([state, messages, 0.0, False], error.output, time.perf_counter() - started)

    async def close(self) -> None:
        """End the sandbox."""
        await self._sandbox.close()


def _calls_of(question: Question) -> list[dict[str, Any]]:
    action = question["arguments"].get("action")
    return action["calls"] if isinstance(action, dict) else []
