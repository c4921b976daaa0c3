"""What the age of rollouts has cost since the step before: time waited for old groups, answers dropped, their lengths.

It decides nothing (assembly.py does). Neighbour: loop.py tells it, and puts its figures into the step's.
"""

from __future__ import annotations

from collections.abc import Iterable

from gspo.common.telemetry import metrics
from gspo.learner.assembly.settlements import SettledGroup


class StalenessCost:
    """The account of one learner, from step to step."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._dropped: list[int] = []

    def waited(self, seconds: float) -> None:
        """The learner waited for groups that a further version would make too old."""
        self._waited_s += seconds

    def ended(self, groups: Iterable[SettledGroup]) -> None:
        """Groups ended without training; the lengths of those too old count."""
        self._dropped += [length for group in groups for length in group.response_tokens]

    def figures(self) -> dict[str, float]:
        """By their public names; the account begins anew."""
        lengths, waited_s = self._dropped, self._waited_s
        self._dropped, self._waited_s = [], 0.0
        metrics.STALE_TOKENS.labels("dropped").inc(sum(lengths))
        metrics.STALE_WAIT_SECONDS.inc(waited_s)
        found = {"wait_old_s": waited_s, "dropped_rollouts": float(len(lengths)), "dropped_tokens": float(sum(lengths))}
        if lengths:
            mean, longest = sum(lengths) / len(lengths), float(max(lengths))
            found |= {"dropped_response_tokens_mean": mean, "dropped_response_tokens_max": longest}
        return found
