"""Chooses the groups of the next step: complete, the oldest first, none too old, each settled once.

Pure and synchronous: no Redis, no file, no clock. The same rows, seed and step give the same batch, in the same order.
A step file has the result, so a replay draws no random number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np
import torch

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.schema import StalenessConfig
from gspo.common.config.sources import Source
from gspo.common.source_order import SourceOrder
from gspo.learner.assembly.groups import Group, reward_counts
from gspo.learner.assembly.rows import Row
from gspo.learner.assembly.settlements import EndedGroup, GroupEnding, Settlements
from gspo_core.advantage import RunningMoments, normalize_rewards
from gspo_proto.rollout_pb2 import GroupFailure, ScoredRollout


class AddResult(StrEnum):
    """The result of adding an entry. All but NEW may be acknowledged at once."""

    NEW = "new"
    DUPLICATE = "duplicate"  # this rollout is here, or in the log, already
    LATE = "late"  # its group has ended


@dataclass(frozen=True)
class Batch:
    """A step to log and train. `groups` end as trained with it; `settled` ended otherwise, now."""

    step: int
    rows: tuple[Row, ...]  # in training order
    groups: tuple[int, ...]
    settled: tuple[EndedGroup, ...]


@dataclass(frozen=True)
class WaitingForGroups:
    """No step yet: `what` is 'groups' or 'old_groups', `detail` a phrase for the user. `settled` ended now."""

    what: str
    detail: str
    settled: tuple[EndedGroup, ...]


@dataclass(frozen=True)
class PromptsUsedUp:
    """No step ever: every group that was issued, and will be, is settled."""

    settled: tuple[EndedGroup, ...]


@dataclass(frozen=True)
class NoUsableGroups:
    """No step: all groups of max_refill batches failed or were filtered. `reason` names the last one's."""

    reason: str
    settled: tuple[EndedGroup, ...]


class Assembler:
    """Collects scored rollouts and makes batches of them.

    Args:
        seed: The run's; with the step it fixes the permutation.
        settlements: How groups have ended so far, from the run directory; copied.
        on_failure: Whether a failed score fails its rollout alone or its group.
        rewards_count: Whether rewards have a part in the advantages, which are 0 otherwise.
        sources: The sources of prompts; one without a name by default.
        moments: Running moments of rewards as of the last trained step; updated in place under reward_norm: running.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        staleness: StalenessConfig,
        *,
        seed: int,
        settlements: Settlements,
        moments: RunningMoments,
        on_failure: Literal["rollout", "group"] = "rollout",
        rewards_count: bool = True,
        sources: Sequence[Source] = (Source(),),
    ) -> None:
        self._source_names = [source.name for source in sources]
        self._source_order = SourceOrder([source.weight for source in sources])
        self.moments = moments
        self._algorithm, self._staleness, self._seed = algorithm, staleness, seed
        self._fails_as_one, self._rewards_count = on_failure == "group", rewards_count
        self._settlements = Settlements(settlements)
        self._groups: dict[int, Group] = {}
        self._fruitless: list[EndedGroup] = []

    def add(self, entry: ScoredRollout | GroupFailure) -> AddResult:
        """Take an entry of the `scored` stream.

        Raises:
            ValueError: A malformed rollout, which is not kept.
        """
        number = entry.group if isinstance(entry, GroupFailure) else entry.rollout.group
        if (ended := self._settlements.get(number)) is not None:
            is_logged = ended is GroupEnding.TRAINED and isinstance(entry, ScoredRollout)
            return AddResult.DUPLICATE if is_logged else AddResult.LATE
        group = self._groups.get(number) or Group(number, self._algorithm, fails_as_one=self._fails_as_one)
        if isinstance(entry, ScoredRollout) and entry.rollout.number in group:
            return AddResult.DUPLICATE
        if group.is_complete:
            return AddResult.LATE
        if isinstance(entry, ScoredRollout):
            group.add(entry)
        else:
            group.failure_reason = entry.reason
        self._groups[number] = group
        return AddResult.NEW

    def knows(self, group: int) -> bool:
        """Whether something of this group is here, or it has ended."""
        return group in self._groups or group in self._settlements

    def next_batch(
        self, version: int, open_groups: Mapping[int, int], *, num_groups: int | None = None
    ) -> Batch | WaitingForGroups | PromptsUsedUp | NoUsableGroups:
        """The batch that makes version + 1, or why there is none yet; either way, the groups that ended by now.

        The groups of the result are settled from now on: the caller records them before it does anything else.

        Args:
            version: The learner's version.
            open_groups: Group -> least version of its tokens, of all groups issued and not settled.
            num_groups: Groups issued in all once the prompts are exhausted; None before.
        """
        settled = self._settle_spent(version)
        size = self._algorithm.rollout_batch_size
        complete = sorted(
            (group for group in self._groups.values() if group.is_complete),
            key=lambda group: (version if group.oldest is None else group.oldest, group.number),
        )
        chosen = complete[:size]
        if missing := self._missing_old_groups(version, chosen, open_groups):
            detail = f"{len(chosen)} of {size} groups; {missing}"
            return self._unless_hopeless(WaitingForGroups("old_groups", detail, settled), chosen)
        is_last = self._all_are_here(num_groups) or self._has_refilled_enough()
        if len(chosen) == size or (chosen and is_last):
            return self._make_batch(version, chosen, settled)
        if self._all_are_here(num_groups):
            return PromptsUsedUp(settled)
        return self._unless_hopeless(WaitingForGroups("groups", f"{len(chosen)} of {size} groups", settled), chosen)

    def settle_unused(self, open_groups: Iterable[int], reason: str) -> tuple[EndedGroup, ...]:
        """End every group that is open or has rollouts here: the run ends without it."""
        unsettled = (set(open_groups) | set(self._groups)) - set(self._settlements)
        return tuple(self._settle(group, GroupEnding.UNUSED, reason) for group in sorted(unsettled))

    def replay(self, rows: Sequence[Row]) -> None:
        """Take the rewards of a logged step into the running moments, as its assembly did."""
        if self._algorithm.reward_norm == "running":
            update_moments(self.moments, rows, self._algorithm)

    def reassemble(self, step: int, rows: Sequence[Row]) -> list[Row]:
        """The rows of a logged step with the mini-batches and advantages that the present keys give them.

        Under the keys of their assembly they are the logged rows, to the bit. The running moments take their rewards.
        """
        num_mini_batches = self._algorithm.num_mini_batches
        ordered = in_training_order(rows, seed=self._seed, step=step, num_mini_batches=num_mini_batches)
        if self._rewards_count:
            return with_advantages(ordered, self._algorithm, self.moments)
        return [replace(row, advantage=None if row.skipped else 0.0) for row in ordered]

    def _settle(self, group: int, settlement: GroupEnding, reason: str) -> EndedGroup:
        ended = self._groups.pop(group, None)
        self._settlements.add(group, settlement)
        lengths = tuple(row.num_sampled for row in ended.rows()) if ended and settlement is GroupEnding.STALE else ()
        is_scored = settlement in (GroupEnding.STALE, GroupEnding.FILTERED)
        differ = len(ended.counted_rewards) > 1 if ended and is_scored else None
        return EndedGroup(group, settlement, reason, lengths, differ)

    def _settle_spent(self, version: int) -> tuple[EndedGroup, ...]:
        """End the complete groups that cannot be trained on, by number."""
        settled = []
        for number in sorted(self._groups):
            group = self._groups[number]
            if group.is_complete and (ending := group.ending(version, self._staleness)):
                is_first = version == 0 and ending[0] is GroupEnding.FILTERED
                ended = self._settle(number, *ending)
                settled.append(replace(ended, first_rows=tuple(group.rows())) if is_first else ended)
        self._fruitless += [s for s in settled if s.settlement in (GroupEnding.FAILED, GroupEnding.FILTERED)]
        return tuple(settled)

    def _missing_old_groups(self, version: int, chosen: Sequence[Group], open_groups: Mapping[int, int]) -> str | None:
        """Under on_stale: wait, the groups without which this step would make some group too old; None if none.

        A group whose oldest token is of version o must be trained at version o + max_lag at the latest, and there is
        one batch a version. So among the groups due at version + k or before, at most k batches may remain.
        The oldest groups satisfy that at every k, so the wait for them always ends.
        """
        if self._staleness.on_stale != "wait":
            return None
        size, max_lag = self._algorithm.rollout_batch_size, self._staleness.max_lag
        oldest = self._oldest_versions(version, open_groups)
        taken = {group.number for group in chosen}
        for k in range(max_lag + 1):
            due = [group for group in sorted(oldest) if oldest[group] + max_lag <= version + k]
            missing = [group for group in due if group not in taken]
            # A lower max_lag on resume may leave more than a batch holds; the rest ends stale then.
            if missing and len(taken.intersection(due)) < min(size, len(due) - k * size):
                others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                return f"group {missing[0]}{others} under max_lag {max_lag}"
        return None

    def _oldest_versions(self, version: int, open_groups: Mapping[int, int]) -> dict[int, int]:
        """Group -> version of the oldest token that counts in it, or may come."""
        oldest = {group: least for group, least in open_groups.items() if group not in self._settlements}
        for number, group in self._groups.items():
            if group.oldest is None:
                if group.is_complete:
                    oldest.pop(number, None)
            elif group.is_complete:
                oldest[number] = group.oldest
            elif group.oldest < version - self._staleness.max_lag:
                oldest.pop(number, None)  # too old already: waiting would not save it
            else:
                oldest[number] = min(group.oldest, oldest.get(number, group.oldest))
        return oldest

    def _all_are_here(self, num_groups: int | None) -> bool:
        """Whether the prompts are exhausted and every group that was issued is settled or complete."""
        if num_groups is None:
            return False
        num_complete = sum(group.is_complete for group in self._groups.values())
        return len(self._settlements) + num_complete >= num_groups

    def _make_batch(self, version: int, chosen: Sequence[Group], settled: tuple[EndedGroup, ...]) -> Batch:
        step = version + 1
        rows = [
            replace(row, source=self._source_names[self._source_order.place(group.number).source])
            for group in chosen
            for row in group.rows_to_train(version, self._staleness)
        ]
        rows = self.reassemble(step, rows)
        for group in chosen:
            self._settle(group.number, GroupEnding.TRAINED, f"step {step}")
        self._fruitless.clear()
        return Batch(step, tuple(rows), tuple(sorted(group.number for group in chosen)), settled)

    def _has_refilled_enough(self) -> bool:
        """Whether max_refill batches of groups have ended without training since the last step."""
        return len(self._fruitless) >= self._algorithm.max_refill * self._algorithm.rollout_batch_size

    def _unless_hopeless(self, waiting: WaitingForGroups, chosen: Sequence[Group]) -> WaitingForGroups | NoUsableGroups:
        if chosen or not self._has_refilled_enough():
            return waiting
        last = self._fruitless[-1]
        reason = (
            f"{len(self._fruitless)} groups in a row failed or were filtered, none was trained; the last one, "
            f"group {last.group}, was {last.settlement}: {last.reason}"
        )
        return NoUsableGroups(reason, waiting.settled)


def in_training_order(rows: Sequence[Row], *, seed: int, step: int, num_mini_batches: int) -> list[Row]:
    """The rows permuted by (seed, step) and cut into mini-batches; their order before has no effect.

    Sizes of mini-batches differ by one at most; with fewer rows than mini-batches each row is one. Skipped rows come
    last and are in no mini-batch.
    """
    rows = sorted(rows, key=lambda row: (row.group, row.number))
    trained = [row for row in rows if row.skipped is None]
    order = np.random.default_rng((seed, step)).permutation(len(trained))
    cuts = np.array_split(order, min(num_mini_batches, len(trained)) or 1)
    placed = [replace(trained[i], step=step, mini_batch=mini_batch) for mini_batch, cut in enumerate(cuts) for i in cut]
    return placed + [replace(row, step=step) for row in rows if row.skipped is not None]


def with_advantages(rows: Sequence[Row], algorithm: AlgorithmConfig, moments: RunningMoments) -> list[Row]:
    """The rows with their normalised rewards; under running, `moments` is updated in row order.

    A row whose loss alone is masked has an advantage too, for its reward is one of the group's.
    """
    counted = [row for row in rows if reward_counts(row, algorithm)]
    advantages_B = normalize_rewards(
        _rewards(counted),
        torch.tensor([row.group for row in counted], dtype=torch.long),
        reward_norm=algorithm.reward_norm,
        reward_shift=algorithm.reward_shift,
        reward_scale=algorithm.reward_scale,
        reward_clip=algorithm.reward_clip,
        moments=moments if algorithm.reward_norm == "running" else None,
    )
    advantages = iter(advantages_B.tolist())
    return [replace(row, advantage=next(advantages)) if reward_counts(row, algorithm) else row for row in rows]


def update_moments(moments: RunningMoments, rows: Sequence[Row], algorithm: AlgorithmConfig) -> None:
    """Update the moments from a logged step, to the bit as `with_advantages` did under running."""
    moments.update(_rewards([row for row in rows if reward_counts(row, algorithm)]))


def _rewards(rows: Sequence[Row]) -> torch.Tensor:
    return torch.tensor([row.reward for row in rows], dtype=torch.float64)
