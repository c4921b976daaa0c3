"""How groups ended: each exactly once. assembler.py decides it, and run_directory.py writes it down."""

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
    """A group that ended, and why. `response_tokens` of each of its rollouts, if it was too old to train on."""

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
        """A copy with the same groups."""
        return self.without(())

    def without(self, groups: Iterable[int]) -> Settlements:
        """A copy without some groups."""
        rest = Settlements()
        rest._ended = dict(self._ended)
        for group in groups:
            rest._ended.pop(group, None)
        return rest

    def add(self, group: int, settlement: Settlement) -> None:
        """Enter a group's ending.

        Raises:
            ValueError: It has ended before.
        """
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
        """How a group ended; None before that."""
        return self._ended.get(group)

    def counts(self) -> dict[str, int]:
        """Groups by settlement, all five named."""
        counts = {settlement.value: 0 for settlement in Settlement}
        # A copy: gRPC calls count while another thread adds.
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
