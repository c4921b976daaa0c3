"""The shares of a step's time: worked by hand from a step's figures."""

from __future__ import annotations

import pytest

from gspo.common.telemetry.step_time import overlapped_seconds, seconds_by_cause, seconds_by_function, shares

STEP = {
    "wait_s": 5.0, "wait_push_s": 0.5, "wait_queue_s": 1.0, "wait_generation_s": 2.0, "wait_reward_s": 1.5,
    "wait_reward_by_slow_s": 1.5, "train_s": 3.0, "publish_s": 0.25, "hold_s": 0.75, "log_s": 0.25, "record_s": 0.25,
    "checkpoint_s": 0.5, "step_s": 9.25,
}  # fmt: skip


def test_every_second_has_one_cause() -> None:
    found = seconds_by_cause(STEP)
    assert found == {
        "issue": 0, "queue": 1.0, "generation": 2.0, "reward": 1.5, "intake": 0, "training": 3.0, "shift": 0,
        "push": 0.75,
        "evaluation": 0.75, "checkpoint": 0.5, "log": 0.5,
    }  # fmt: skip
    assert sum(found.values()) == STEP["step_s"] + STEP["checkpoint_s"] + STEP["record_s"]


def test_shares_are_of_the_whole_time_and_the_largest_is_first() -> None:
    step_shares = shares(STEP, STEP)
    assert (step_shares[0].cause, step_shares[0].seconds, step_shares[0].share) == ("training", 6.0, 0.3)
    assert sum(share.share for share in step_shares) == pytest.approx(1)
    assert "issue" not in {share.cause for share in step_shares}
    assert shares() == []


def test_a_function_is_known_by_the_wait_for_it() -> None:
    assert seconds_by_function(STEP, STEP, {"wait_reward_by_other_s": 4.0}) == {"other": 4.0, "slow": 3.0}
    assert list(seconds_by_function(STEP, {"wait_reward_by_other_s": 4.0})) == ["other", "slow"]


def test_work_beside_the_learner_s_own_is_no_part_of_the_step() -> None:
    beside = STEP | {"version_beside_s": 1.0}
    assert seconds_by_cause(beside) == seconds_by_cause(STEP)
    assert overlapped_seconds(beside, STEP) == {"making the version of the step before, beside training": 0.5}
    assert overlapped_seconds(STEP) == overlapped_seconds() == {}
