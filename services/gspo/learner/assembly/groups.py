"""One group: the rollouts that have come, their ages, and whether it can be trained.

assembler.py chooses the groups of a batch.
"""

from dataclasses import replace

import torch

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.schema import StalenessConfig
from gspo.learner.assembly.rows import Row, lowered, row_from_scored
from gspo.learner.assembly.settlements import GroupEnding
from gspo_core.advantage import overlong_penalty
from gspo_proto.rollout_pb2 import ScoredRollout


class Group:
    """A group that is not settled yet; the first result of each rollout wins.

    Args:
        fails_as_one: One failed score fails the group.
    """

    def __init__(self, number: int, algorithm: AlgorithmConfig, *, fails_as_one: bool = False) -> None:
        self.number = number
        self.failure_reason: str | None = None
        self.num_rollouts: int | None = None
        self.oldest: int | None = None  # version of the oldest token that counts
        self.newest: int | None = None
        self._rows: dict[int, Row] = {}
        self._algorithm, self._fails_as_one = algorithm, fails_as_one

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    @property
    def num_here(self) -> int:
        """Rollouts that have come."""
        return len(self._rows)

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to come: all rollouts are here, or the group was given up."""
        return self.failure_reason is not None or self.num_here == self.num_rollouts

    def add(self, scored: ScoredRollout) -> None:
        """Take a rollout.

        Raises:
            ValueError: It is malformed, or does not fit into its group.
        """
        row = row_from_scored(scored)
        size = self.num_rollouts or row.num_rollouts
        if row.num_rollouts != size or row.number >= size:
            raise ValueError(
                f"rollout {row.group}-{row.number} of {row.num_rollouts} does not fit into a group of {size} rollouts"
            )
        self.num_rollouts = size
        if skipped := self._why_skipped(row):
            row = replace(row, skipped=skipped)
        row = self._with_length_penalty(row)
        self._rows[row.number] = row
        versions = row.version[row.mask]
        if row.skipped is None and len(versions):
            oldest, newest = int(versions.min()), int(versions.max())
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)
            self.newest = newest if self.newest is None else max(self.newest, newest)

    def ending(self, version: int, staleness: StalenessConfig) -> tuple[GroupEnding, str] | None:
        """How and why a complete group ends untrained at the learner's `version`; None if it can be trained."""
        if self.failure_reason is not None:
            return GroupEnding.FAILED, self.failure_reason
        failures = [row.failure for row in self.rows() if row.skipped == "failed"]
        if len(failures) == self.num_here:
            return GroupEnding.FAILED, f"every rollout failed, the last one: {failures[-1]}"
        if failures and self._fails_as_one:
            return GroupEnding.FAILED, f"{len(failures)} of its rollouts failed, the last one: {failures[-1]}"
        if all(row.skipped for row in self._rows.values()):
            return GroupEnding.FILTERED, f"no rollout counts: {len(failures)} failed, the others were truncated"
        rewards = self.counted_rewards
        if self._algorithm.filter_zero_spread and len(rewards) == 1:
            return GroupEnding.FILTERED, f"zero spread: every reward is {rewards.pop():g}"
        # With masking one young token is enough; otherwise one old token makes the group stale.
        masks = staleness.on_stale == "mask"
        deciding, limit = (self.newest, staleness.token_age_limit) if masks else (self.oldest, staleness.max_lag)
        if deciding is not None and version - deciding > limit:
            return GroupEnding.STALE, f"sampled by version {deciding}, trained at {version}; at most {limit} behind"
        return None

    @property
    def counted_rewards(self) -> set[float | None]:
        """The different rewards of the rollouts that count, or whose reward counts."""
        return {row.reward for row in self._rows.values() if reward_counts(row, self._algorithm)}

    def rows(self) -> list[Row]:
        """The rollouts by number, with `skipped` set if the score failed or the answer was cut off."""
        return [self._rows[number] for number in sorted(self._rows)]

    def rows_to_train(self, version: int, staleness: StalenessConfig) -> list[Row]:
        """The rollouts by number; under on_stale: mask, tokens too old at the learner's `version` leave the mask."""
        if staleness.on_stale != "mask":
            return self.rows()
        return [_without_old_tokens(row, version - staleness.token_age_limit) for row in self.rows()]

    def _why_skipped(self, row: Row) -> str | None:
        if row.failure is not None:
            return "failed"
        masks = self._algorithm.mask_truncated or self._algorithm.mask_truncated_completions
        return "truncated" if masks and row.outcome == "truncated" else None

    def _with_length_penalty(self, row: Row) -> Row:
        buffer = self._algorithm.overlong_buffer
        if buffer is None or row.reward is None:
            return row
        penalty_B = overlong_penalty(
            torch.tensor([row.num_sampled]),
            response_length=self._algorithm.response_length,
            buffer=buffer,
            penalty=self._algorithm.overlong_penalty,
        )
        return lowered(row, "overlong", penalty_B.item())


def reward_counts(row: Row, algorithm: AlgorithmConfig) -> bool:
    """Whether the row's reward is part of the moments of its group: it is trained, or only its loss is masked."""
    is_masked = algorithm.mask_truncated_completions and row.skipped == "truncated"
    return row.skipped is None or is_masked


def _without_old_tokens(row: Row, oldest_allowed: int) -> Row:
    mask = row.mask & (row.version >= oldest_allowed)
    if row.skipped is None and row.mask.any() and not mask.any():
        return replace(row, mask=mask, skipped="stale")
    return replace(row, mask=mask)
