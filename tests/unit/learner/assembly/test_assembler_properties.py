"""For any entries in any order: each group is settled once, and no token that counts is too old.

A simulated run: a coordinator with its slots, generators that take weights late, results that come twice or never.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.schema import StalenessConfig
from gspo.learner.assembly.assembler import AddResult, Assembler, Batch, PromptsUsedUp, WaitingForGroups
from gspo.learner.assembly.settlements import EndedGroup, GroupEnding, Settlements
from gspo_core.advantage import RunningMoments
from gspo_proto.rollout_pb2 import OUTCOME_EOS, OUTCOME_TRUNCATED, GroupFailure
from tests.unit.learner.conftest import MakeScored

SIZE, NUM_ROLLOUTS, NUM_GROUPS = 3, 2, 30
MAX_TICKS = 20_000


class SimulatedAssembly:
    """A run in small; every choice is made by `chance`."""

    def __init__(self, scored: MakeScored, chance: Random, staleness: StalenessConfig, failing: float) -> None:
        self.scored, self.chance, self.staleness, self.failing = scored, chance, staleness, failing
        algorithm = AlgorithmConfig(
            rollout_batch_size=SIZE,
            num_return_sequences_in_group=NUM_ROLLOUTS,
            num_mini_batches=2,
            mask_truncated=True,
            filter_zero_spread=failing > 0,
            max_refill=NUM_GROUPS,
        )
        self.assembler = Assembler(algorithm, staleness, seed=1, settlements=Settlements(), moments=RunningMoments())
        self.version = self.live = self.issued = 0
        self.open: dict[int, int] = {}
        self.missing: list[tuple[int, int]] = []
        self.version_of: dict[int, int] = {}  # a trained group's slot, until the version made from it is live
        self.batches: list[Batch] = []
        self.settled: list[EndedGroup] = []
        self.is_over = False

    def play(self) -> SimulatedAssembly:
        """Ticks until every group is settled; fails where the run hangs."""
        actions = [self.issue, self.finish_a_rollout, self.finish_a_rollout, self.go_live, self.assemble]
        for _ in range(MAX_TICKS):
            self.chance.choice(actions)()
            if self.is_over:
                return self
        raise AssertionError(f"the run hangs at version {self.version}, live {self.live}: open {self.open}")

    def issue(self) -> None:
        slots = (self.staleness.max_lag + 1) * SIZE
        if self.issued < NUM_GROUPS and len(self.open) + len(self.version_of) < slots:
            self.open[self.issued] = self.live
            self.missing += [(self.issued, number) for number in range(NUM_ROLLOUTS)]
            self.issued += 1

    def finish_a_rollout(self) -> None:
        self.missing = [(group, number) for group, number in self.missing if group in self.open]
        if not self.missing:
            return
        group, number = self.missing.pop(self.chance.randrange(len(self.missing)))
        if self.chance.random() < self.failing / 4:
            self.assembler.add(GroupFailure(group=group, reason="deadline"))
            return
        rollout = self.scored(
            group,
            number,
            version=sorted(self.chance.randint(self.open[group], self.live) for _ in range(3)),
            reward=None if self.chance.random() < self.failing else self.chance.choice([0.0, 1.0]),
            outcome=OUTCOME_TRUNCATED if self.chance.random() < self.failing else OUTCOME_EOS,
        )
        self.assembler.add(rollout)
        if self.chance.random() < 0.3:
            assert self.assembler.add(rollout) in (AddResult.DUPLICATE, AddResult.LATE)

    def go_live(self) -> None:
        self.live = self.version
        self.version_of = {group: version for group, version in self.version_of.items() if version > self.live}

    def assemble(self) -> None:
        num_groups = NUM_GROUPS if self.issued == NUM_GROUPS else None
        outcome = self.assembler.next_batch(self.version, dict(self.open), num_groups=num_groups)
        assert isinstance(outcome, Batch | WaitingForGroups | PromptsUsedUp)
        self.settled += outcome.settled
        for ended in outcome.settled:
            del self.open[ended.group]
        if isinstance(outcome, Batch):
            self.version = outcome.step
            self.batches.append(outcome)
            for group in outcome.groups:
                del self.open[group]
                self.version_of[group] = outcome.step
        self.is_over = isinstance(outcome, PromptsUsedUp)


@pytest.mark.parametrize("max_lag", [0, 1, 2, 3])
@pytest.mark.parametrize("on_stale", ["wait", "drop", "mask"])
@given(seed=st.integers(0, 2**32), failing=st.sampled_from([0.0, 0.2]))
def test_each_group_is_settled_once_and_nothing_too_old_counts(
    scored: MakeScored, on_stale: str, max_lag: int, seed: int, failing: float
) -> None:
    staleness = StalenessConfig.model_validate({"on_stale": on_stale, "max_lag": max_lag})
    run = SimulatedAssembly(scored, Random(seed), staleness, failing).play()  # noqa: S311 - a simulation, and repeatable

    ended = Counter(ended.group for ended in run.settled)
    ended.update(group for batch in run.batches for group in batch.groups)
    assert ended == Counter(range(NUM_GROUPS))

    for batch in run.batches:
        assert {row.group for row in batch.rows} == set(batch.groups)
        assert len(batch.rows) == NUM_ROLLOUTS * len(batch.groups)
        if failing:
            for group in batch.groups:
                assert len({row.reward for row in batch.rows if row.group == group and row.skipped != "failed"}) == 2
        for row in batch.rows:
            if row.skipped is None and row.mask.any():
                assert batch.step - 1 - row.version[row.mask].min() <= max_lag
    assert all(len(batch.groups) == SIZE for batch in run.batches[:-1])
    if on_stale == "wait":
        assert not [ended for ended in run.settled if ended.settlement is GroupEnding.STALE]
