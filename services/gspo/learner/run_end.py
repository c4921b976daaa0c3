"""When the learner's run ends, and why: a stop, the last step or hour, or the last prompt.

waits for: Finished, unblocked by the coordinator, given up at a deadline.
"""

import asyncio
from collections.abc import Awaitable, Callable

from gspo.common.config.schema import RunConfig
from gspo.common.tasks import wait_until_set
from gspo_proto.rollout_pb2 import RUN_END_COMPLETED, RUN_END_STOPPED, RUN_END_UNSPECIFIED, RunEnd

# Between two looks at the groups that the coordinator may still have issued.
_POLL_S = 0.25
_SECONDS_PER_HOUR = 3600.0


class RunFailedError(RuntimeError):
    """The run cannot go on, for a reason that the user has to know."""


class RunEndCondition:
    """The condition under which the run ends.

    Attributes:
        kind: How training ended; unspecified before.
        done_reason: Why training is done; empty before.
        finished: Set when the coordinator has finished the run, or the process has to end without it.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config, self._stop_reason = config, ""
        self.kind: RunEnd.ValueType = RUN_END_UNSPECIFIED
        self.done_reason = ""
        self.finished = asyncio.Event()

    @property
    def is_stopped(self) -> bool:
        """Whether the run was asked to stop: a resume trains the groups that are open."""
        return bool(self._stop_reason)

    def reason(self, version: int, trained_s: float) -> str:
        """Why the run ends now; empty if it does not.

        Args:
            version: The newest policy version.
            trained_s: Seconds that all recorded steps took.
        """
        if self._stop_reason or self.done_reason:
            return self._stop_reason or self.done_reason
        total_steps, total_hours = self._config.total_steps, self._config.total_hours
        if total_steps is not None and version >= total_steps:
            return f"total_steps {total_steps} reached"
        if total_hours is not None and trained_s >= total_hours * _SECONDS_PER_HOUR:
            return f"total_hours {total_hours:g} reached"
        return ""

    def stop(self, reason: str) -> None:
        """End the run after the current step."""
        self._stop_reason = f"stopped: {reason}"

    def use_up_prompts(self) -> None:
        """End the run: every prompt has been used as often as the configuration asks."""
        self.done_reason = "all prompts are used"

    def finish_training(self, reason: str) -> None:
        self.done_reason, self.kind = reason, RUN_END_STOPPED if self.is_stopped else RUN_END_COMPLETED

    async def wait_for_finished(self, max_wait_s: float, on_poll: Callable[[], Awaitable[None]]) -> None:
        """Wait until `finished` is set, and call `on_poll` meanwhile.

        Raises:
            RunFailedError: It is not set within `max_wait_s`.
        """
        try:
            async with asyncio.timeout(max_wait_s):
                while not self.finished.is_set():
                    await on_poll()
                    await wait_until_set(self.finished, _POLL_S)
        except TimeoutError as error:
            raise RunFailedError(f"the coordinator did not finish the run within {max_wait_s:g} s") from error
