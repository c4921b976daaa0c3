"""A rollout of several branches in its group: one member, with one advantage, and one age for all branches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.schema import StalenessConfig
from gspo.learner.assembly.assembler import Assembler, Batch
from gspo.learner.assembly.settlements import Settlements
from gspo_core.advantage import RunningMoments
from gspo_proto.rollout_pb2 import OUTCOME_EOS, OUTCOME_TRUNCATED
from tests.support.training.numpy_reference import normalized

# Of a rollout with so many branches: versions of its tokens, -1 for a context, and where the further ones begin.
BRANCHES: dict[int, tuple[list[int], list[int]]] = {
    1: ([0, 0], []),
    2: ([0, 0, -1, 0], [2]),
    3: ([0, -1, -1, 0, -1, 0, 0], [1, 4]),
}


def assembler(num_rollouts: int, *, max_lag: int = 1, on_stale: str = "wait", **algorithm: Any) -> Assembler:
    keys = {"rollout_batch_size": 1, "num_return_sequences_in_group": num_rollouts, "num_mini_batches": 1, **algorithm}
    return Assembler(
        AlgorithmConfig.model_validate(keys),
        StalenessConfig.model_validate({"max_lag": max_lag, "on_stale": on_stale}),
        seed=0,
        settlements=Settlements(),
        moments=RunningMoments(),
    )


members = st.tuples(st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from(["counted", "failed", "truncated"]))


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@given(st.lists(st.tuples(members, st.sampled_from(sorted(BRANCHES))), min_size=2, max_size=6), st.randoms())
def test_a_baseline_is_of_the_members_that_count_in_any_number_of_branches(
    scored: Any, estimator: str, drawn: list[Any], random: Any
) -> None:
    """A failed or masked member moves no other's, nor does the number of its branches."""
    a = assembler(len(drawn), mask_truncated=True, adv_estimator=estimator)
    entries = []
    for number, ((reward, kind), num_branches) in enumerate(drawn):
        version, starts = BRANCHES[num_branches]
        outcome = OUTCOME_TRUNCATED if kind == "truncated" else OUTCOME_EOS
        given_reward = None if kind == "failed" else reward
        fields = {"version": version, "branch_starts": starts, "outcome": outcome, "reward": given_reward}
        entries.append(scored(0, number, num_rollouts=len(drawn), **fields))
    for entry in random.sample(entries, len(entries)):
        a.add(entry)
    rewards = [reward for (reward, kind), _ in drawn if kind == "counted"]
    batch = a.next_batch(0, {})
    if not rewards:
        assert not isinstance(batch, Batch)
        return
    assert isinstance(batch, Batch)
    norm = "group" if estimator == "grpo" else "leave_one_out"
    expected = normalized(rewards, [0] * len(rewards), norm, False, False, None)
    rows = sorted((row for row in batch.rows if row.skipped is None), key=lambda row: row.number)
    assert [row.advantage for row in rows] == pytest.approx(expected.tolist())
    assert [1 + len(row.branch_starts) for row in rows] == [
        num_branches for (_, kind), num_branches in drawn if kind == "counted"
    ]


@pytest.mark.parametrize("old", [0, 3, 6])
def test_one_old_token_of_any_branch_makes_the_rollout_old(scored: Any, old: int) -> None:
    version = [5, -1, -1, 5, -1, 5, 5]
    version[old] = 3
    a = assembler(2, on_stale="drop")
    a.add(scored(0, 0, version=version, branch_starts=[1, 4]))
    a.add(scored(0, 1, version=[5, 5]))
    (settled,) = a.next_batch(5, {}).settled
    assert settled.reason == "sampled by version 3, trained at 5; at most 1 behind"


def test_old_tokens_leave_the_mask_and_the_branches_stay(scored: Any) -> None:
    a = assembler(2, on_stale="mask")
    a.add(scored(0, 0, version=[3, -1, -1, 3, -1, 5, 5], branch_starts=[1, 4]))
    a.add(scored(0, 1, version=[5, 5], reward=0.0))
    batch = a.next_batch(5, {})
    assert isinstance(batch, Batch)
    (row,) = (row for row in batch.rows if row.number == 0)
    assert row.mask.tolist() == [False] * 5 + [True] * 2
    assert (row.branch_starts.tolist(), row.skipped) == ([1, 4], None)
