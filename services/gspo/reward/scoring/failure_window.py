"""The share of failed scores over the newest rollouts, compared with its bound.

The consumer sends a problem as an event; the coordinator then pauses the run.
"""

from __future__ import annotations

from collections import Counter, deque

from gspo_proto.rollout_pb2 import Score

TEXT_CHARS = 1000


class FailureWindow:
    """The outcomes of the newest `size` rollouts.

    Args:
        max_share: A larger share of failures is a problem.
    """

    def __init__(self, size: int, max_share: float) -> None:
        self._max_share = max_share
        self._kinds: deque[str] = deque(maxlen=size)  # "" is a score

    def add(self, score: Score) -> str | None:
        """Count a score.

        Returns:
            The problem if too many of a full window failed, and None otherwise. The window then starts anew.
        """
        failed = score.WhichOneof("result") == "failure"
        self._kinds.append(score.failure_kind or "exception" if failed else "")
        if not failed or len(self._kinds) < (self._kinds.maxlen or 0):
            return None
        kinds = Counter(kind for kind in self._kinds if kind)
        share = kinds.total() / len(self._kinds)
        if share <= self._max_share:
            return None
        of = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        problem = (
            f"{share:.0%} of the last {len(self._kinds)} scores failed ({of}), more than reward.max_failure_share "
            f"{self._max_share:g}; the last one: {score.failure[:TEXT_CHARS]}"
        )
        self._kinds.clear()
        return problem
