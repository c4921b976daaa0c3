"""Where a step's time went, phase by phase: what the learner waited for, did, and did between two steps.

It draws no conclusions (services/gspo/common/telemetry/bottleneck.py does).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from gspo.common.service.traces import Traces
from gspo.common.telemetry import metrics
from gspo.learner.telemetry.rollout_timelines import RolloutTimeline, RolloutTimelines, StepWait, seconds_waited
from gspo.learner.telemetry.step_traces import StepTimes, StepTraces


class StepClock:
    """The clock of one learner.

    Args:
        timelines: Of the rollouts that wait for their step.
        traces: Where the spans of a step go.
    """

    def __init__(self, timelines: RolloutTimelines, traces: Traces) -> None:
        self._timelines, self._traces = timelines, StepTraces(traces)
        self._step_timelines: list[RolloutTimeline] = []
        self._trained = 0.0
        self._wait = StepWait(0.0, 0.0, 0.0, 0.0)
        self._phases: dict[str, float] = {}
        self._phase_began = self._ended = self._checkpoint_s = 0.0

    def wait_over(self, began: float, *, live_unix_s: float, evaluated_unix_s: float) -> None:
        """A batch is complete. Only before the first step is the issue of groups held up by an evaluation.

        Args:
            began: By time.monotonic: the time of day may be set while the learner waits.
        """
        evaluated, now = 0.0 if self._ended else evaluated_unix_s, time.time()
        self._wait = StepWait(now - (time.monotonic() - began), now, live_unix_s, evaluated)

    def begin(self, groups: Iterable[int]) -> None:
        """A step of these groups begins, now that they are complete."""
        self._step_timelines = timelines = self._timelines.take(groups)
        for journey in timelines:
            metrics.ROLLOUT_WAIT_SECONDS.observe(max(0.0, self._wait.ended - journey.scored))
        wait_s, now = self._wait.ended - self._wait.began, time.monotonic()
        between_s = now - self._ended - wait_s if self._ended else 0.0
        self._phases = {
            "wait_s": wait_s,
            **seconds_waited(timelines, self._wait),
            "checkpoint_s": self._checkpoint_s,
            "record_s": max(0.0, between_s - self._checkpoint_s),
        }
        self._phase_began, self._checkpoint_s = now, 0.0

    def over(self, phase: str) -> None:
        """A phase of the step is over: it took the time since the one before."""
        now = time.monotonic()
        self._phases[phase], self._phase_began = now - self._phase_began, now
        self._ended = now
        if phase == "train_s":
            self._trained = time.time()

    def published(self, version: int) -> None:
        """The version is handed to the publisher."""
        self._traces.trained(version, self._step_timelines, StepTimes(self._wait.ended, self._trained, time.time()))

    def live(self, version: int) -> None:
        """A generator serves the version."""
        self._traces.live(version, time.time())

    def checkpoint(self, seconds: float) -> None:
        """A checkpoint was written; it counts to the step after it."""
        self._checkpoint_s += seconds
        metrics.CHECKPOINT_SECONDS.observe(seconds)

    def figures(self) -> dict[str, float]:
        """Seconds by phase; step_s is from the wait to the end of the last phase, without what came before the wait."""
        inside = ("wait_s", "log_s", "train_s", "publish_s", "hold_s")
        return self._phases | {"step_s": sum(self._phases.get(name, 0.0) for name in inside)}
