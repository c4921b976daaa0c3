"""The learner's stations of each rollout's trace: waiting for a step, being trained, its version being pushed.

Neighbours: step_clock.py knows the times, services/common/traces.py sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.traces import Traces
from services.learner.waits import Journey


@dataclass(frozen=True)
class _Published:
    journeys: Sequence[Journey]
    unix_s: float


class StepTraces:
    """Holds the rollouts of a step until its version is live; nothing where traces are off."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._published: dict[int, _Published] = {}

    def trained(self, step: int, journeys: Sequence[Journey], began_unix_s: float, published_unix_s: float) -> None:
        """A step of these rollouts began, and made a version that is pushed from `published_unix_s` on."""
        if not self._traces.on:
            return
        for journey in journeys:
            which = (journey.group, journey.number)
            self._traces.add("wait", *which, journey.scored, began_unix_s)
            self._traces.add("train", *which, began_unix_s, published_unix_s, step=step)
        self._published[step] = _Published(journeys, published_unix_s)

    def live(self, version: int, unix_s: float) -> None:
        """A generator serves a version."""
        for made in [made for made in self._published if made <= version]:
            published = self._published.pop(made)
            for journey in published.journeys:
                which = (journey.group, journey.number)
                self._traces.add("push", *which, published.unix_s, unix_s, version=made)
