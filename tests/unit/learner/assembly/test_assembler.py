"""Every rule of assembly, with groups written out by hand. Batches of 2 groups of 2 rollouts unless said otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.schema import StalenessConfig
from gspo.common.config.sources import Source
from gspo.learner.assembly.assembler import (
    AddResult,
    Assembler,
    Batch,
    NoUsableGroups,
    PromptsUsedUp,
    WaitingForGroups,
    update_moments,
)
from gspo.learner.assembly.settlements import EndedGroup, GroupEnding, Settlements
from gspo.learner.storage.group_results import rewards_differ
from gspo_core.advantage import RunningMoments
from gspo_proto.rollout_pb2 import OUTCOME_TRUNCATED, GroupFailure
from tests.unit.learner.conftest import MakeScored


def assembler(
    *,
    max_lag: int = 1,
    on_stale: str = "wait",
    max_token_age: int | None = None,
    seed: int = 0,
    on_failure: Any = "rollout",
    rewards_count: bool = True,
    sources: Sequence[Source] = (Source(),),
    **algorithm: Any,
) -> Assembler:
    keys = {"rollout_batch_size": 2, "num_return_sequences_in_group": 2, "num_mini_batches": 1, **algorithm}
    return Assembler(
        AlgorithmConfig.model_validate(keys),
        StalenessConfig.model_validate({"max_lag": max_lag, "on_stale": on_stale, "max_token_age": max_token_age}),
        seed=seed,
        settlements=Settlements(),
        moments=RunningMoments(),
        on_failure=on_failure,
        rewards_count=rewards_count,
        sources=sources,
    )


@pytest.fixture
def fill(scored: MakeScored) -> Callable[..., None]:
    """Adds whole groups: rewards 1 and 0, all tokens of one version."""

    def add_groups(assembler: Assembler, *groups: int, version: int = 0) -> None:
        for group in groups:
            for number, reward in enumerate((1.0, 0.0)):
                added = assembler.add(scored(group, number, version=[version, version], reward=reward))
                assert added is AddResult.NEW

    return add_groups


def test_a_batch_holds_the_oldest_complete_groups(fill: Callable[..., None], scored: MakeScored) -> None:
    a = assembler()
    fill(a, 5, 3, version=1)
    fill(a, 8, version=0)
    a.add(scored(2, 0, version=[1, 1]))
    batch = a.next_batch(1, {2: 1})
    assert isinstance(batch, Batch)
    assert (batch.step, batch.groups, batch.settled) == (2, (3, 8), ())
    assert {row.step for row in batch.rows} == {2}
    assert isinstance(a.next_batch(2, {}), WaitingForGroups)


def test_it_waits_for_enough_groups(fill: Callable[..., None]) -> None:
    a = assembler()
    fill(a, 0)
    assert a.next_batch(0, {0: 0, 1: 0}) == WaitingForGroups("groups", "1 of 2 groups", ())


def test_an_incomplete_group_is_no_group(fill: Callable[..., None], scored: MakeScored) -> None:
    a = assembler()
    fill(a, 0)
    a.add(scored(1, 0))
    assert isinstance(a.next_batch(0, {0: 0, 1: 0}), WaitingForGroups)
    a.add(scored(1, 1))
    assert isinstance(a.next_batch(0, {0: 0, 1: 0}), Batch)


def test_the_first_result_of_a_rollout_wins(scored: MakeScored) -> None:
    a = assembler(rollout_batch_size=1)
    assert a.add(scored(0, 0, reward=1.0)) is AddResult.NEW
    assert a.add(scored(0, 0, reward=9.0, attempt=2)) is AddResult.DUPLICATE
    assert a.add(scored(0, 1, reward=0.0)) is AddResult.NEW
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    assert sorted(row.reward for row in batch.rows if row.reward is not None) == [0.0, 1.0]
    assert a.add(scored(0, 1, reward=9.0)) is AddResult.DUPLICATE


def test_groups_in_the_run_directory_are_not_taken_again(scored: MakeScored) -> None:
    settlements = Settlements()
    settlements.add(3, GroupEnding.TRAINED)
    settlements.add(4, GroupEnding.STALE)
    a = Assembler(AlgorithmConfig(), StalenessConfig(), seed=0, settlements=settlements, moments=RunningMoments())
    assert a.add(scored(3, 0)) is AddResult.DUPLICATE
    assert a.add(scored(4, 0)) is AddResult.LATE
    assert a.add(GroupFailure(group=3, reason="deadline")) is AddResult.LATE
    assert a.add(scored(5, 0)) is AddResult.NEW


def test_a_malformed_rollout_is_refused_and_leaves_nothing(scored: MakeScored) -> None:
    a = assembler()
    with pytest.raises(ValueError, match="rollout 0-2 of 2 does not fit into a group of 2"):
        a.add(scored(0, 2))
    a.add(scored(0, 0))
    with pytest.raises(ValueError, match="rollout 0-1 of 3 does not fit into a group of 2"):
        a.add(scored(0, 1, num_rollouts=3))
    assert a.add(scored(0, 1)) is AddResult.NEW


# Advantages and order


def test_advantages_are_normalised_in_the_group(fill: Callable[..., None]) -> None:
    a = assembler(rollout_batch_size=1)
    fill(a, 0)
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    # Rewards 1 and 0: mean 0.5, unbiased std sqrt(0.5).
    expected = 0.5 / (0.5**0.5 + 1e-6)
    assert {row.number: row.advantage for row in batch.rows} == {
        0: pytest.approx(expected, rel=1e-12),
        1: pytest.approx(-expected, rel=1e-12),
    }


def test_under_a_teacher_alone_every_advantage_is_0(fill: Callable[..., None], scored: MakeScored) -> None:
    """The rewards stay in the rows, and a failed score leaves its rollout out as elsewhere."""
    a = assembler(rewards_count=False)
    fill(a, 0)
    a.add(scored(1, 0, reward=5.0))
    a.add(scored(1, 1, reward=None))
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    rows = {(row.group, row.number): (row.reward, row.advantage, row.skipped) for row in batch.rows}
    assert rows == {
        (0, 0): (1.0, 0.0, None),
        (0, 1): (0.0, 0.0, None),
        (1, 0): (5.0, 0.0, None),
        (1, 1): (None, None, "failed"),
    }


def test_running_moments_take_rewards_in_and_a_replay_does_the_same(
    fill: Callable[..., None], scored: MakeScored
) -> None:
    keys: dict[str, Any] = {"adv_estimator": "reinforce", "reward_norm": "running", "rollout_batch_size": 1}
    a, replayed = assembler(**keys), assembler(**keys)
    for group in range(3):
        a.add(scored(group, 0, reward=0.1 * group))
        a.add(scored(group, 1, reward=None if group == 1 else 0.7))
        batch = a.next_batch(0, {})
        assert isinstance(batch, Batch)
        replayed.replay(batch.rows)
    assert a.moments.count == 5
    assert a.moments.mean == pytest.approx((0.0 + 0.7 + 0.1 + 0.2 + 0.7) / 5)
    assert replayed.moments == a.moments


@pytest.mark.parametrize("reward_norm", ["group", "running"])
def test_logged_rows_are_assembled_again_to_the_same_and_under_other_keys_to_others(
    scored: MakeScored, reward_norm: str
) -> None:
    keys: dict[str, Any] = {
        "adv_estimator": "reinforce",
        "reward_norm": reward_norm,
        "rollout_batch_size": 4,
        "num_mini_batches": 3,
    }
    a, same, other = assembler(**keys), assembler(**keys), assembler(**{**keys, "num_mini_batches": 1})
    for group in range(4):
        a.add(scored(group, 0, reward=0.1 * group))
        a.add(scored(group, 1, reward=None if group == 1 else 0.7))
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)

    def shown(rows: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(row.step, row.group, row.number, row.mini_batch, row.advantage) for row in rows]

    assert shown(same.reassemble(1, batch.rows)) == shown(batch.rows)
    assert same.moments == a.moments
    again = shown(other.reassemble(1, batch.rows))
    assert {row[3] for row in again} == {0, -1}
    assert [row[:3] for row in again] == [row[:3] for row in shown(batch.rows)]


def test_mini_batches_are_cut_by_whole_rollouts_and_differ_by_one_at_most(
    fill: Callable[..., None], scored: MakeScored
) -> None:
    a = assembler(rollout_batch_size=5, num_mini_batches=4)
    fill(a, 0, 1, 2, 3)
    a.add(scored(4, 0))
    a.add(scored(4, 1, reward=None))
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    # Nine rollouts count; the failed one is last, and in no mini-batch.
    assert [row.mini_batch for row in batch.rows] == [0, 0, 0, 1, 1, 2, 2, 3, 3, -1]
    assert (batch.rows[-1].skipped, batch.rows[-1].advantage) == ("failed", None)


def test_fewer_rollouts_than_mini_batches_are_one_each(scored: MakeScored) -> None:
    a = assembler(rollout_batch_size=1, num_mini_batches=2)
    a.add(scored(0, 0))
    a.add(scored(0, 1, reward=None))
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    assert [row.mini_batch for row in batch.rows] == [0, -1]


def _order(fill: Callable[..., None], groups: list[int], **keys: Any) -> list[tuple[int, int]]:
    version = keys.pop("version", 0)
    a = assembler(rollout_batch_size=8, **keys)
    fill(a, *groups, version=version)
    batch = a.next_batch(version, {})
    assert isinstance(batch, Batch)
    return [(row.group, row.number) for row in batch.rows]


def test_the_order_depends_on_seed_and_step_and_on_nothing_else(fill: Callable[..., None]) -> None:
    order = _order(fill, [*range(8)])
    assert sorted(order) == [(group, number) for group in range(8) for number in range(2)]
    assert order != sorted(order)
    assert _order(fill, [7, 2, 5, 0, 1, 3, 6, 4]) == order
    assert _order(fill, [*range(8)], seed=1) != order
    assert _order(fill, [*range(8)], version=1) != order


# Rollouts and groups that do not count


def test_a_failed_rollout_is_left_out_of_the_groups_moments(scored: MakeScored) -> None:
    a = assembler(rollout_batch_size=1)
    for number, reward in enumerate([1.0, None, 0.0]):
        a.add(scored(0, number, reward=reward, num_rollouts=3))
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    rows = {row.number: row for row in batch.rows}
    assert (rows[1].skipped, rows[1].reward, rows[1].advantage) == ("failed", None, None)
    assert rows[1].failure == "reward raised ValueError"
    # With a failure counted as 0 the mean would be 1/3 and these two would not mirror each other.
    assert rows[0].advantage is not None and rows[2].advantage is not None
    assert rows[0].advantage == pytest.approx(-rows[2].advantage)


def test_under_on_failure_group_one_failed_score_fails_the_group(scored: MakeScored) -> None:
    a = assembler(on_failure="group", num_return_sequences_in_group=2)
    a.add(scored(0, 0, reward=1.0))
    a.add(scored(0, 1, reward=None, failure="it raised"))
    result = a.next_batch(0, {})
    assert [(ended.settlement.value, ended.reason) for ended in result.settled] == [
        ("failed", "1 of its rollouts failed, the last one: it raised")
    ]


def test_a_group_whose_rollouts_all_failed_is_settled_at_once_with_the_last_reason(scored: MakeScored) -> None:
    a = assembler()
    a.add(scored(0, 1, reward=None, failure="second"))
    a.add(scored(0, 0, reward=None, failure="first"))
    waiting = a.next_batch(0, {0: 0})
    expected = EndedGroup(0, GroupEnding.FAILED, "every rollout failed, the last one: second")
    assert waiting == WaitingForGroups("groups", "0 of 2 groups", (expected,))
    assert a.add(scored(0, 0)) is AddResult.LATE
    assert a.next_batch(0, {0: 0}).settled == ()


def test_a_group_that_was_given_up_is_failed_with_its_reason(scored: MakeScored) -> None:
    a = assembler()
    a.add(scored(0, 0))
    assert a.add(GroupFailure(group=0, attempt=3, reason="no result after 3 attempts")) is AddResult.NEW
    assert a.add(scored(0, 1)) is AddResult.LATE
    settled = a.next_batch(0, {0: 0}).settled
    assert settled == (EndedGroup(0, GroupEnding.FAILED, "no result after 3 attempts"),)


def test_a_failure_after_the_last_rollout_changes_nothing(fill: Callable[..., None]) -> None:
    a = assembler(rollout_batch_size=1)
    fill(a, 0)
    assert a.add(GroupFailure(group=0, reason="too late")) is AddResult.LATE
    assert isinstance(a.next_batch(0, {}), Batch)


def test_truncated_answers_are_left_out_only_where_asked(scored: MakeScored) -> None:
    for mask_truncated, skipped in [(True, "truncated"), (False, None)]:
        a = assembler(rollout_batch_size=1, mask_truncated=mask_truncated)
        a.add(scored(0, 0))
        a.add(scored(0, 1, outcome=OUTCOME_TRUNCATED))
        batch = a.next_batch(0, {})
        assert isinstance(batch, Batch)
        assert {row.number: row.skipped for row in batch.rows} == {0: None, 1: skipped}


@pytest.mark.parametrize(("key", "advantage"), [("mask_truncated", 0.0), ("mask_truncated_completions", 0.9354)])
def test_the_rewards_of_truncated_answers_leave_their_group_or_only_their_losses_do(
    scored: MakeScored, key: str, advantage: float
) -> None:
    """Four right and four truncated answers: TRL's mask_truncated_completions has (1 - 0.5) / 0.5345 = 0.935."""
    keys: dict[str, Any] = {"rollout_batch_size": 1, "num_return_sequences_in_group": 8, key: True}
    a = assembler(**keys)
    for number in range(4):
        a.add(scored(0, number, num_rollouts=8, reward=1.0))
        a.add(scored(0, 4 + number, num_rollouts=8, reward=0.0, outcome=OUTCOME_TRUNCATED))
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    trained = [row for row in batch.rows if row.skipped is None]
    assert [row.advantage for row in trained] == pytest.approx([advantage] * 4, abs=1e-4)
    assert [row.skipped for row in batch.rows if row not in trained] == ["truncated"] * 4
    logged = rewards_differ((row.group, row.reward, row.skipped, row.advantage) for row in batch.rows)
    assert logged == {0: advantage > 0}
    # The filter, and running moments in a recovery, see the same rewards.
    filtering = assembler(filter_zero_spread=True, **keys)
    moments = RunningMoments()
    running = AlgorithmConfig.model_validate({"adv_estimator": "reinforce", "reward_norm": "running", key: True})
    update_moments(moments, batch.rows, running)
    assert moments.count == (8 if advantage else 4)
    for row in batch.rows:
        outcome = {"outcome": OUTCOME_TRUNCATED} if row.skipped else {}
        filtering.add(scored(0, row.number, num_rollouts=8, reward=row.reward, **outcome))
    assert isinstance(filtering.next_batch(0, {}), Batch) == (advantage > 0)


def test_a_group_of_which_nothing_counts_is_filtered(scored: MakeScored) -> None:
    a = assembler(mask_truncated=True)
    a.add(scored(0, 0, reward=None))
    a.add(scored(0, 1, outcome=OUTCOME_TRUNCATED))
    reason = "no rollout counts: 1 failed, the others were truncated"
    assert a.next_batch(0, {}).settled == (EndedGroup(0, GroupEnding.FILTERED, reason, rewards_differ=False),)


def test_a_group_with_equal_rewards_is_trained_with_advantage_0(scored: MakeScored) -> None:
    a = assembler(rollout_batch_size=1)
    for number in range(2):
        a.add(scored(0, number, reward=0.1))
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    assert [row.advantage for row in batch.rows] == [0.0, 0.0]


def test_max_refill_batches_without_a_trained_group_end_the_run(scored: MakeScored, fill: Callable[..., None]) -> None:
    a = assembler(max_refill=2)
    for group in range(3):
        a.add(GroupFailure(group=group, reason="hangs"))
    assert isinstance(a.next_batch(0, {}), WaitingForGroups)
    fill(a, 10, 11)
    assert isinstance(a.next_batch(0, {}), Batch)  # a trained group breaks the row
    for group in range(20, 24):
        assert isinstance(a.next_batch(1, {}), WaitingForGroups)
        a.add(GroupFailure(group=group, reason="hangs"))
    hopeless = a.next_batch(1, {})
    assert isinstance(hopeless, NoUsableGroups)
    assert hopeless.reason == (
        "4 groups in a row failed or were filtered, none was trained; the last one, group 23, was failed: hangs"
    )
    assert [settled.group for settled in hopeless.settled] == [23]


def test_groups_without_spread_are_dropped_and_others_fill_the_batch(
    scored: MakeScored, fill: Callable[..., None]
) -> None:
    a = assembler(filter_zero_spread=True)
    for number in range(2):
        a.add(scored(0, number, reward=0.1))
    fill(a, 1)
    expected = EndedGroup(0, GroupEnding.FILTERED, "zero spread: every reward is 0.1", rewards_differ=False)
    waiting = a.next_batch(0, {2: 0})
    assert waiting == WaitingForGroups("groups", "1 of 2 groups", (expected,))
    assert [row.number for row in waiting.settled[0].first_rows] == [0, 1], "the first policy's answers, to be judged"
    fill(a, 2)
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    assert (batch.groups, batch.settled) == ((1, 2), ())


def test_spread_is_that_of_the_rollouts_that_count(scored: MakeScored) -> None:
    a = assembler(filter_zero_spread=True, mask_truncated=True)
    a.add(scored(0, 0, reward=1.0, num_rollouts=4))
    a.add(scored(0, 1, reward=None, num_rollouts=4))
    a.add(scored(0, 2, reward=0.0, num_rollouts=4, outcome=OUTCOME_TRUNCATED))
    a.add(scored(0, 3, reward=1.0, num_rollouts=4))
    (settled,) = a.next_batch(0, {}).settled
    assert (settled.settlement, settled.reason) == (GroupEnding.FILTERED, "zero spread: every reward is 1")


def test_a_batch_that_max_refill_batches_could_not_fill_is_trained_as_it_is(
    scored: MakeScored, fill: Callable[..., None]
) -> None:
    a = assembler(filter_zero_spread=True, max_refill=2)
    fill(a, 0)
    for group in range(1, 5):
        assert isinstance(a.next_batch(0, {}), WaitingForGroups)
        for number in range(2):
            a.add(scored(group, number))
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    assert (batch.groups, [settled.group for settled in batch.settled]) == ((0,), [4])
    fill(a, 6)
    assert isinstance(a.next_batch(1, {}), WaitingForGroups)  # the count begins anew


def test_a_long_answer_has_its_reward_lowered_and_the_log_says_so(scored: MakeScored) -> None:
    a = assembler(rollout_batch_size=1, response_length=10, overlong_buffer=4, overlong_penalty=2.0)
    a.add(scored(0, 0, version=[0] * 7, num_rollouts=3))
    a.add(
        scored(0, 1, version=[0] * 6 + [-1] * 3, num_rollouts=3)
    )  # tokens that the policy did not sample cost nothing
    a.add(scored(0, 2, version=[0] * 10, num_rollouts=3, reward=None))
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    rows = {row.number: row for row in batch.rows}
    assert [rows[number].reward for number in range(3)] == [0.5, 1.0, None]
    assert rows[0].advantage is not None and rows[1].advantage is not None
    assert rows[0].advantage == pytest.approx(-rows[1].advantage)
    parts = [{part["name"]: part["value"] for part in json.loads(rows[number].parts_json)} for number in range(3)]
    assert parts == [{"exact": 1.0, "overlong": -0.5}, {"exact": 1.0}, {}]


# Age


def test_it_waits_for_a_group_that_the_next_version_would_make_too_old(fill: Callable[..., None]) -> None:
    a = assembler(max_lag=1)
    fill(a, 1, 2, version=1)
    # Group 0 may hold tokens of version 0; step 2 is the last that may train them.
    waiting = a.next_batch(1, {0: 0, 1: 1, 2: 1})
    assert waiting == WaitingForGroups("old_groups", "2 of 2 groups; group 0 under max_lag 1", ())
    fill(a, 0, version=0)
    batch = a.next_batch(1, {0: 0, 1: 1, 2: 1})
    assert isinstance(batch, Batch)
    assert batch.groups == (0, 1)


def test_it_does_not_wait_for_a_group_that_has_time(fill: Callable[..., None]) -> None:
    a = assembler(max_lag=2)
    fill(a, 1, 2, version=1)
    assert isinstance(a.next_batch(1, {0: 0}), Batch)


def test_it_looks_ahead_where_more_groups_come_due_than_a_batch_holds(fill: Callable[..., None]) -> None:
    # max_lag 2, batches of 2: groups 0 to 2 of version 0 are due at version 2. Trained at version 1 without any of
    # them, three would be left for the two places of step 3.
    a = assembler(max_lag=2)
    fill(a, 8, 9, version=1)
    open_groups = {0: 0, 1: 0, 2: 0, 8: 1, 9: 1}
    waiting = a.next_batch(1, open_groups)
    assert waiting == WaitingForGroups("old_groups", "2 of 2 groups; group 0 and 2 more under max_lag 2", ())
    fill(a, 1, version=0)
    batch = a.next_batch(1, open_groups)
    assert isinstance(batch, Batch)
    assert batch.groups == (1, 8)


@pytest.mark.parametrize("on_stale", ["drop", "mask"])
def test_drop_and_mask_do_not_wait(fill: Callable[..., None], on_stale: str) -> None:
    a = assembler(max_lag=1, on_stale=on_stale)
    fill(a, 1, 2, version=1)
    assert isinstance(a.next_batch(1, {0: 0}), Batch)


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
@pytest.mark.parametrize("differ", [False, True])
def test_a_group_with_a_token_too_old_is_stale(scored: MakeScored, on_stale: str, differ: bool) -> None:
    a = assembler(max_lag=1, on_stale=on_stale)
    a.add(scored(0, 0, version=[5, 5, -1, 5], reward=0.5 if differ else 1.0))
    a.add(scored(0, 1, version=[3, 5]))
    reason = "sampled by version 3, trained at 5; at most 1 behind"
    # With how long its answers were: the loss by length is reported.
    assert a.next_batch(5, {}).settled == (EndedGroup(0, GroupEnding.STALE, reason, (3, 2), rewards_differ=differ),)


def test_only_tokens_that_count_make_a_group_old(scored: MakeScored) -> None:
    a = assembler(max_lag=1, on_stale="drop", rollout_batch_size=1, mask_truncated=True)
    a.add(scored(0, 0, version=[5, -1], num_rollouts=3))
    a.add(scored(0, 1, version=[0, 0], num_rollouts=3, reward=None))
    a.add(scored(0, 2, version=[0, 0], num_rollouts=3, outcome=OUTCOME_TRUNCATED))
    assert isinstance(a.next_batch(5, {}), Batch)


def test_mask_takes_old_tokens_out_of_the_rows_mask(scored: MakeScored) -> None:
    a = assembler(max_lag=1, on_stale="mask", rollout_batch_size=1)
    a.add(scored(0, 0, version=[3, 4, -1, 5], num_rollouts=3))
    a.add(scored(0, 1, version=[2, 3], num_rollouts=3))
    a.add(scored(0, 2, version=[5, 5], num_rollouts=3, reward=0.0))
    batch = a.next_batch(5, {})
    assert isinstance(batch, Batch)
    rows = {row.number: row for row in batch.rows}
    assert rows[0].mask.tolist() == [False, True, False, True]
    assert (rows[0].skipped, rows[2].skipped) == (None, None)
    assert (rows[1].skipped, rows[1].mask.tolist(), rows[1].advantage) == ("stale", [False, False], None)
    assert rows[1].version.tolist() == [2, 3]


def test_mask_goes_by_max_token_age(scored: MakeScored) -> None:
    a = assembler(max_lag=3, on_stale="mask", max_token_age=1, rollout_batch_size=1)
    a.add(scored(0, 0, version=[3, 4]))
    a.add(scored(0, 1, version=[3, 5]))
    batch = a.next_batch(5, {})
    assert isinstance(batch, Batch)
    assert {row.number: row.mask.tolist() for row in batch.rows} == {0: [False, True], 1: [False, True]}


def test_a_group_that_masking_empties_is_stale(fill: Callable[..., None]) -> None:
    a = assembler(max_lag=1, on_stale="mask")
    fill(a, 0, version=3)
    reason = "sampled by version 3, trained at 5; at most 1 behind"
    (settled,) = a.next_batch(5, {}).settled
    assert (settled.group, settled.settlement, settled.reason) == (0, GroupEnding.STALE, reason)


def test_a_lag_lowered_on_resume_does_not_wait_for_ever(fill: Callable[..., None]) -> None:
    a = assembler(max_lag=0)
    fill(a, 0, 1, version=4)
    # Five groups are due and a batch holds two: it trains two, and the rest ends stale.
    open_groups = dict.fromkeys(range(5), 4)
    assert isinstance(a.next_batch(4, open_groups), Batch)


# The end


def test_the_last_batch_may_be_smaller(fill: Callable[..., None], scored: MakeScored) -> None:
    a = assembler()
    fill(a, 0)
    a.add(scored(1, 0))
    assert a.next_batch(0, {}, num_groups=2) == WaitingForGroups("groups", "1 of 2 groups", ())
    a.add(GroupFailure(group=1, reason="deadline"))
    batch = a.next_batch(0, {}, num_groups=2)
    assert isinstance(batch, Batch)
    assert (batch.groups, batch.settled) == ((0,), (EndedGroup(1, GroupEnding.FAILED, "deadline"),))
    assert a.next_batch(1, {}, num_groups=2) == PromptsUsedUp(())


def test_a_wiped_redis_does_not_look_like_the_end(fill: Callable[..., None]) -> None:
    a = assembler()
    fill(a, 0)
    # Three groups were issued; that none is open may mean that Redis has lost them.
    assert isinstance(a.next_batch(0, {}, num_groups=3), WaitingForGroups)


def test_what_is_open_at_the_end_is_unused(fill: Callable[..., None], scored: MakeScored) -> None:
    a = assembler(rollout_batch_size=1)
    fill(a, 0, 1)
    a.add(scored(2, 0))
    assert isinstance(a.next_batch(0, {}), Batch)
    settled = a.settle_unused([0, 1, 2, 3], "the run ended at step 1")
    assert [(s.group, s.settlement, s.reason) for s in settled] == [
        (group, GroupEnding.UNUSED, "the run ended at step 1") for group in (1, 2, 3)
    ]
    assert a.settle_unused([0, 1, 2, 3], "again") == ()


def test_a_row_has_the_source_of_its_group(fill: Callable[..., None]) -> None:
    a = assembler(sources=[Source(name="a", weight=3), Source(name="b")], rollout_batch_size=4)
    fill(a, 3, 2, 1, 0)
    batch = a.next_batch(0, {})
    assert isinstance(batch, Batch)
    assert {row.group: row.source for row in batch.rows} == {0: "a", 1: "a", 2: "b", 3: "a"}
