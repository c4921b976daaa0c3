"""The learner's stations of each rollout's trace: waiting for a step, being trained, its version being pushed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo.common.service.traces import Traces
from gspo.learner.telemetry.rollout_timelines import RolloutTimeline


@dataclass(frozen=True)
class _PublishedStep:
    timelines: Sequence[RolloutTimeline]
    unix_s: float


@dataclass(frozen=True)
class StepTimes:
    """When a step began, when it was trained, and when its version was handed to the publisher; Unix seconds."""

    began: float
    trained: float
    published: float


class StepTraces:
    """Holds the rollouts of a step until its version is live; nothing where traces are off."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._published: dict[int, _PublishedStep] = {}

    def trained(self, step: int, timelines: Sequence[RolloutTimeline], times: StepTimes) -> None:
        """A step of these rollouts was made; its version is pushed from now on."""
        if not self._traces.on:
            return
        for journey in timelines:
            which = (journey.group, journey.number)
            self._traces.add("wait", *which, journey.scored, times.began)
            self._traces.add("train", *which, times.began, times.trained, step=step)
        self._published[step] = _PublishedStep(timelines, times.published)

    def live(self, version: int, unix_s: float) -> None:
        """A generator serves a version."""
        for made in [made for made in self._published if made <= version]:
            published = self._published.pop(made)
            for journey in published.timelines:
                which = (journey.group, journey.number)
                self._traces.add("push", *which, published.unix_s, unix_s, version=made)
