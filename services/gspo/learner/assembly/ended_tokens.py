"""The tokens of rollouts that have ended, for the token ledger: counted in their arrays, each in its column.

services/gspo/common/streams/token_counts.py adds them up when the entries of `scored` are acknowledged.
"""

from dataclasses import dataclass, replace
from typing import Self

from gspo.common.streams.inbox import Delivery
from gspo.common.streams.keys import rollout_key
from gspo.common.streams.token_counts import NO_TOKENS, EndedTokens, num_sampled
from gspo.learner.assembly.rows import Row
from gspo.learner.assembly.settlements import GroupEnding
from gspo_proto.rollout_pb2 import GroupFailure, Rollout


@dataclass(frozen=True)
class PendingEntry:
    """An entry that waits for its acknowledgement, without its content.

    Attributes:
        key: The rollout's; empty where the entry is a group's failure.
        num_tokens: Sampled tokens in its arrays.
    """

    delivery: Delivery
    group: int
    key: str
    num_tokens: int

    @classmethod
    def of(cls, delivery: Delivery, issued: Rollout | GroupFailure) -> Self:
        delivery = replace(delivery, payload=b"", message=None)
        if isinstance(issued, GroupFailure):
            return cls(delivery, issued.group, "", 0)
        return cls(delivery, issued.group, row_key(issued), num_sampled(issued.version))

    def ended_as(self, ending: GroupEnding) -> EndedTokens:
        """Its tokens in the column of how its group ended without training."""
        return EndedTokens(self.key, ending.value, self.num_tokens)


def row_key(rollout: Rollout | Row) -> str:
    return rollout_key(rollout.group, rollout.number)


def trained_tokens(row: Row) -> EndedTokens:
    """The tokens of a logged row: those in its loss, and those that were left out and why."""
    num_counted = 0 if row.skipped else int(row.mask.sum())
    num_masked = row.num_sampled - num_counted
    # A rollout has one column for its masked tokens: ties beside old ones count as old.
    are_tied = 0 < num_masked == row.num_tied
    masked = f"masked_{row.skipped or ('tied' if are_tied else 'stale')}"
    return EndedTokens(row_key(row), "trained", num_counted, masked, num_masked)


def late_tokens(rollout: Rollout, column: str) -> EndedTokens:
    """The tokens of a rollout whose group has ended, or that is in its group already."""
    return EndedTokens(row_key(rollout), column, num_sampled(rollout.version), if_recorded=True)


def dead_tokens(issued: Rollout | GroupFailure) -> EndedTokens:
    """The tokens of an entry that becomes a dead letter."""
    return NO_TOKENS if isinstance(issued, GroupFailure) else late_tokens(issued, "dead_letters")
