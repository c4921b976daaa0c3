"""How groups ended: each one exactly once, with a reason, counted and found by its number.

It decides no ending (assembly.py does) and writes no file (rundir.py does).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from gspo_proto import rollout_pb2


class Settlement(StrEnum):
    """The five ways in which a group ends."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"
    UNUSED = "unused"


@dataclass(frozen=True)
class SettledGroup:
    """A group that ended, and why. `response_tokens` of each of its rollouts, where it was too old to train on."""

    group: int
    settlement: Settlement
    reason: str
    response_tokens: tuple[int, ...] = ()

    def to_proto(self) -> rollout_pb2.SettledGroup:
        """As it travels in a GroupsSettled event."""
        number = rollout_pb2.Settlement.Value(f"SETTLEMENT_{self.settlement.name}")
        return rollout_pb2.SettledGroup(group=self.group, settlement=number, reason=self.reason)


class Settlements:
    """Group -> how it ended."""

    def __init__(self) -> None:
        self._ended: dict[int, Settlement] = {}

    def copy(self) -> Settlements:
        """One of its own with the same groups."""
        copied = Settlements()
        copied._ended = dict(self._ended)
        return copied

    def without(self, groups: Iterable[int]) -> Settlements:
        """One of its own, less some groups."""
        left = self.copy()
        for group in groups:
            left._ended.pop(group, None)
        return left

    def add(self, group: int, settlement: Settlement) -> None:
        """Enter a group's ending. ValueError: it has ended before."""
        if group in self._ended:
            raise ValueError(
                f"group {group} is settled '{self._ended[group]}' and cannot be settled '{settlement}' too"
            )
        self._ended[group] = settlement

    def __contains__(self, group: int) -> bool:
        return group in self._ended

    def __len__(self) -> int:
        return len(self._ended)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ended)

    def get(self, group: int) -> Settlement | None:
        """How a group ended; None while it has not."""
        return self._ended.get(group)

    def counts(self) -> dict[str, int]:
        """Groups by settlement, all five named."""
        counts = {settlement.value: 0 for settlement in Settlement}
        # A copy: the door counts while the loop's thread adds.
        for settlement in list(self._ended.values()):
            counts[settlement.value] += 1
        return counts

    def ranges(self) -> list[tuple[int, int]]:
        """The settled groups as ranges (first, last), both included, in order."""
        ranges: list[tuple[int, int]] = []
        for group in sorted(self._ended):
            if ranges and ranges[-1][1] == group - 1:
                ranges[-1] = (ranges[-1][0], group)
            else:
                ranges.append((group, group))
        return ranges
