"""Notices when too many scores fail: the share over the newest rollouts, and what to say about it.

It pauses nothing: worker.py sends what is said here as an event, and the coordinator acts on it.
"""

from __future__ import annotations

from collections import Counter, deque

from gspo_proto.rollout_pb2 import Score

TEXT_CHARS = 1000


class FailureWindow:
    """The outcomes of the newest `size` rollouts.

    Args:
        max_share: Beyond this share of failures there is something to say.
    """

    def __init__(self, size: int, max_share: float) -> None:
        self._max_share = max_share
        self._kinds: deque[str] = deque(maxlen=size)  # "" is a score

    def add(self, score: Score) -> str | None:
        """Take an outcome; says what is wrong when too many of a full window failed, once, and then starts anew."""
        failed = score.WhichOneof("result") == "failure"
        self._kinds.append(score.failure_kind or "exception" if failed else "")
        if not failed or len(self._kinds) < (self._kinds.maxlen or 0):
            return None
        kinds = Counter(kind for kind in self._kinds if kind)
        share = kinds.total() / len(self._kinds)
        if share <= self._max_share:
            return None
        of = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        said = (
            f"{share:.0%} of the last {len(self._kinds)} scores failed ({of}), more than reward.max_failure_share "
            f"{self._max_share:g}; the last one: {score.failure[:TEXT_CHARS]}"
        )
        self._kinds.clear()
        return said
