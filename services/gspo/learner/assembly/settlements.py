"""How groups ended: each exactly once. assembler.py decides it, and run_directory.py writes it down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from gspo.learner.assembly.rows import Row
from gspo_proto import rollout_pb2


class GroupEnding(StrEnum):
    """The five ways in which a group ends."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"
    UNUSED = "unused"


@dataclass(frozen=True)
class EndedGroup:
    """A group that ended, and why.

    Attributes:
        response_tokens: Those of each of its rollouts, if it was too old to train on.
        rewards_differ: Whether its counted rewards differ; None where it failed or was never scored.
        first_rows: Its rollouts, if it was filtered before the first step.
    """

    group: int
    settlement: GroupEnding
    reason: str
    response_tokens: tuple[int, ...] = ()
    rewards_differ: bool | None = None
    first_rows: tuple[Row, ...] = field(default=(), compare=False, repr=False)

    def to_proto(self) -> rollout_pb2.SettledGroup:
        """As it travels in a GroupsSettled event."""
        number = rollout_pb2.Settlement.Value(f"SETTLEMENT_{self.settlement.name}")
        return rollout_pb2.SettledGroup(group=self.group, settlement=number, reason=self.reason)


class Settlements(dict[int, GroupEnding]):
    """Group -> how it ended."""

    def without(self, groups: Iterable[int]) -> Settlements:
        """A copy without some groups."""
        rest = Settlements(self)
        for group in groups:
            rest.pop(group, None)
        return rest

    def add(self, group: int, settlement: GroupEnding) -> None:
        """Enter a group's ending.

        Raises:
            ValueError: It has ended before.
        """
        if group in self:
            raise ValueError(f"group {group} is settled '{self[group]}' and cannot be settled '{settlement}' too")
        self[group] = settlement

    def counts(self) -> dict[str, int]:
        """Groups by settlement, all five named."""
        # A copy: gRPC calls count while another thread adds.
        numbers = Counter(list(self.values()))
        return {settlement.value: numbers[settlement] for settlement in GroupEnding}

    def ranges(self) -> list[tuple[int, int]]:
        """The settled groups as ranges (first, last), both included, in order."""
        ranges: list[tuple[int, int]] = []
        for group in sorted(self):
            if ranges and ranges[-1][1] == group - 1:
                ranges[-1] = (ranges[-1][0], group)
            else:
                ranges.append((group, group))
        return ranges
