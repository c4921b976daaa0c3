"""The end of a run: after its last step, after a stop, or by a deadline.

A state machine without Redis; loop.py asks it and sends Finished. Every wait has a deadline, and its message names the
missing event.
"""

import time

from gspo.common.config.schema import RunConfig
from gspo_proto.rollout_pb2 import RUN_END_FAILED, RUN_END_STOPPED, RUN_END_UNSPECIFIED, Finished, RunEnd


class Ending:
    """The state of the run's end."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.stop_reason = self.training_reason = self.finished_reason = ""
        self.training_end: RunEnd.ValueType = RUN_END_UNSPECIFIED
        self.finished = self.failed = False
        self.last_version = 0
        self._deadline = float("inf")
        self._records_deadline: float | None = None

    @property
    def training_done(self) -> bool:
        """Whether the learner has trained its last step."""
        return bool(self.training_reason)

    @property
    def over(self) -> bool:
        """Whether no further group may be issued."""
        return bool(self.stop_reason) or self.training_done or self.finished

    @property
    def stopped(self) -> bool:
        """Whether a user asked for the end: no evaluation starts then."""
        return bool(self.stop_reason) or self.training_end == RUN_END_STOPPED

    def on_stop(self, reason: str) -> None:
        """A StopRequested was sent; the learner has run.drain_timeout_s to end its step and write a checkpoint."""
        if not self.over:
            self.stop_reason = reason or "asked to stop"
            self._deadline = time.monotonic() + self._config.drain_timeout_s

    def on_training_done(self, version: int, end: RunEnd.ValueType, reason: str) -> None:
        """The learner has ended; its last version has run.start_timeout_s to become live."""
        if not self.training_done:
            self.last_version, self.training_end, self.training_reason = version, end, reason or "training is done"
            self._deadline = time.monotonic() + self._config.start_timeout_s

    def on_finished(self, finished: Finished) -> None:
        """Finished was sent, by us or by a learner that gave the run up."""
        self.finished, self.finished_reason, self.failed = True, finished.reason, finished.end == RUN_END_FAILED

    def ready_to_measure(self, live_version: int) -> bool:
        """Whether training is completed and its last version is live."""
        return self.training_done and not self.stopped and live_version >= self.last_version

    def waits_for_records(self) -> bool:
        """Whether the end waits for the learner to record the last evaluation.

        The wait ends run.start_timeout_s after the first call; a stopped run does not wait for figures.
        """
        if self._records_deadline is None:
            self._records_deadline = time.monotonic() + self._config.start_timeout_s
        return not self.stopped and time.monotonic() <= self._records_deadline

    def conclude(self, live_version: int, num_open: int = 0) -> Finished | None:
        """The end of the run, once it waits for nothing or its deadline has passed.

        Args:
            num_open: Groups that were issued before TrainingDone came, and are not settled.
        """
        if self.training_done and (self.stopped or (live_version >= self.last_version and not num_open)):
            return Finished(reason=self.training_reason, end=self.training_end)
        if time.monotonic() <= self._deadline:
            return None
        if self.training_done:
            limit = f"{self._config.start_timeout_s:g} s (run.start_timeout_s)"
            reason = f"version {self.last_version} was not live on any generator within {limit}"
            if live_version >= self.last_version:
                reason = f"the learner did not settle the last {num_open} groups within {limit}"
        else:
            limit = f"{self._config.drain_timeout_s:g} s (run.drain_timeout_s)"
            reason = f"the learner did not end within {limit} after a stop ({self.stop_reason})"
        return Finished(reason=reason, end=RUN_END_FAILED)

    def describe(self, live_version: int, num_open: int = 0) -> tuple[str, str]:
        """The awaited event: a bounded name and its completion."""
        if not self.training_done:
            return "learner", f"to end after a stop ({self.stop_reason})"
        if live_version >= self.last_version and num_open:
            return "learner", f"to settle the last {num_open} groups"
        return "live version", f"{self.last_version} on a generator, which has {max(live_version, 0)}"
