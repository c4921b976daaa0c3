"""The time of each phase of a step, and the learner's spans in the trace of each rollout.

services/gspo/common/telemetry/advice.py draws the conclusions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from gspo.common.service.traces import Traces
from gspo.common.telemetry import metrics
from gspo.learner.telemetry.rollout_timelines import RolloutTimeline, StepWait, seconds_waited

# The phases of a step in their order; together they are its step_s.
STEP_PHASES = ("wait_s", "log_s", "train_s", "publish_s", "hold_s")


class StepClock:
    """The clock of one learner.

    Args:
        traces: Where the spans of a step go.
    """

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._timelines: Sequence[RolloutTimeline] = ()
        self._phases: dict[str, float] = {}
        self._phase_began_s = self._ended_s = self._checkpoint_s = 0.0
        self._began_unix_s = self._trained_unix_s = 0.0
        # Version -> its rollouts, and when it was handed to the publisher, until it is live.
        self._published: dict[int, tuple[Sequence[RolloutTimeline], float]] = {}

    def begin(
        self,
        timelines: Sequence[RolloutTimeline],
        *,
        waited_since_s: float,
        live_unix_s: float,
        evaluated_unix_s: float,
    ) -> None:
        """A step of these rollouts begins, now that they are complete.

        Args:
            waited_since_s: When the wait for them began, by time.monotonic: the time of day may be set meanwhile.
            live_unix_s: When the learner's version was first served.
            evaluated_unix_s: When the last evaluation was recorded; it holds up the issue before the first step alone.
        """
        now_s, self._began_unix_s, self._timelines = time.monotonic(), time.time(), timelines
        wait_s = now_s - waited_since_s
        for timeline in timelines:
            metrics.ROLLOUT_WAIT_SECONDS.observe(max(0.0, self._began_unix_s - timeline.scored))
        wait = StepWait(
            began=self._began_unix_s - wait_s,
            ended=self._began_unix_s,
            live=live_unix_s,
            evaluated=0.0 if self._ended_s else evaluated_unix_s,
        )
        between_s = now_s - self._ended_s - wait_s if self._ended_s else 0.0
        self._phases = {
            "wait_s": wait_s,
            **seconds_waited(timelines, wait),
            "checkpoint_s": self._checkpoint_s,
            "record_s": max(0.0, between_s - self._checkpoint_s),
        }
        self._phase_began_s, self._checkpoint_s = now_s, 0.0

    def end_phase(self, phase: str) -> None:
        """A phase of the step is over: it took the time since the one before."""
        now_s = time.monotonic()
        self._phases[phase] = now_s - self._phase_began_s
        self._phase_began_s = self._ended_s = now_s
        if phase == "train_s":
            self._trained_unix_s = time.time()

    def publish(self, version: int) -> None:
        """The version is handed to the publisher; the spans of its rollouts end when it is live."""
        if not self._traces.on:
            return
        for timeline in self._timelines:
            rollout = timeline.group, timeline.number
            self._traces.add("wait", *rollout, timeline.scored, self._began_unix_s)
            self._traces.add("train", *rollout, self._began_unix_s, self._trained_unix_s, step=version)
        self._published[version] = self._timelines, time.time()

    def live(self, version: int) -> None:
        """A generator serves the version, and with it every earlier one is over."""
        now_unix_s = time.time()
        for earlier in [published for published in self._published if published <= version]:
            timelines, published_unix_s = self._published.pop(earlier)
            for timeline in timelines:
                self._traces.add("push", timeline.group, timeline.number, published_unix_s, now_unix_s, version=earlier)

    def add_checkpoint(self, seconds: float) -> None:
        """A checkpoint was written; it counts to the step after it."""
        self._checkpoint_s += seconds
        metrics.CHECKPOINT_SECONDS.observe(seconds)

    def metrics(self) -> dict[str, float]:
        """Seconds by phase; step_s is from the wait to the end of the last phase, without the time before the wait."""
        return self._phases | {"step_s": sum(self._phases.get(name, 0.0) for name in STEP_PHASES)}
