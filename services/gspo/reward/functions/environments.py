"""Environments of the library: resets and steps under the limits of their version, counted like any other call."""

from __future__ import annotations

import time
from collections.abc import Awaitable

from gspo.common.telemetry import metrics
from gspo.reward.functions import environment
from gspo.reward.functions.environment import Turn
from gspo.reward.functions.library import Function
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.calls import CallError, raising_call_errors


class EnvironmentSteps:
    """Answers resets and steps.

    Args:
        usage: Counts calls; None counts none, as in a trial.
        session: Whose calls these are; None: no other call shares a process with any of them.
    """

    def __init__(self, usage: UsageCounter | None, *, session: str | None) -> None:
        self._usage, self._session = usage, session

    async def reset(self, function: Function, task_json: str) -> Turn:
        """Begin with a task.

        Raises:
            CallError: The environment failed, or returned something else.
        """
        return await self._counted(function, environment.reset(function.callee, task_json, session=self._session))

    async def step(self, function: Function, state_json: str, action: str, calls_json: str = "") -> Turn:
        """What an action leads to.

        Raises:
            CallError: The environment failed, or returned something else.
        """
        asked = environment.step(function.callee, state_json, action, calls_json, session=self._session)
        return await self._counted(function, asked)

    async def _counted(self, function: Function, asked: Awaitable[Turn]) -> Turn:
        source, started, result = function.source, time.perf_counter(), "ok"
        function.calls_in_flight += 1
        try:
            with raising_call_errors(source.name):
                return await asked
        except CallError as error:
            result = error.kind
            if self._usage is not None:
                self._usage.fail(source.name, source.version, error.kind, str(error), error.traceback, error.output)
            raise
        finally:
            function.calls_in_flight -= 1
            if self._usage is not None:
                seconds = time.perf_counter() - started
                metrics.REWARD_CALLS.labels(source.name, result).inc()
                metrics.REWARD_SECONDS.labels(source.name).observe(seconds)
                self._usage.add(source.name, source.version, answers=1, seconds=seconds)
