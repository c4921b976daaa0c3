"""The order of a step's rows, and their advantages by the keys of the algorithm, worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.learner.assembly.assembler import in_training_order, update_moments, with_advantages
from gspo.learner.assembly.rows import Row
from gspo_core.advantage import RunningMoments
from tests.support.training.rollout_rows import row_of

# Two groups of two, and one that is skipped and has no reward.
REWARDS = (1.0, 3.0, 5.0, 11.0)
ROOT2 = 2**0.5


def rows(rewards: tuple[float, ...] = REWARDS) -> list[Row]:
    blank: dict[str, Any] = {
        "step": 1,
        "prompt_token_ids": np.zeros(1, dtype=np.int32),
        "token_ids": np.zeros(1, dtype=np.int32),
        "mask": np.ones(1, dtype=np.bool_),
        "version": np.zeros(1, dtype=np.int32),
        "mini_batch": 0,
        "temperature": 1.0,
        "advantage": None,
    }
    trained = [
        row_of(**blank, group=place // 2, number=place % 2, reward=reward) for place, reward in enumerate(rewards)
    ]
    failed: dict[str, Any] = {**blank, "skipped": "failed", "failure": "it raised"}
    return [*trained, row_of(**failed, group=1, number=2, reward=None)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # Groups: means 2 and 8, unbiased deviations sqrt(2) and sqrt(18).
        ({}, [-1 / ROOT2, 1 / ROOT2, -1 / ROOT2, 1 / ROOT2]),
        ({"reward_shift": True}, [-1, 1, -3, 3]),
        ({"reward_shift": True, "reward_clip": 2}, [-1, 1, -2, 2]),
        ({"reward_scale": True}, [1 / ROOT2, 3 / ROOT2, 5 / 18**0.5, 11 / 18**0.5]),
        # The batch: mean 5, squared deviations 16, 4, 0, 36.
        ({"reward_norm": "batch"}, [-4 / (56 / 3) ** 0.5, -2 / (56 / 3) ** 0.5, 0, 6 / (56 / 3) ** 0.5]),
        ({"reward_norm": None, "reward_clip": 4}, [1, 3, 4, 4]),
        # The other one of its group; the failed rollout of the second group is none.
        ({"adv_estimator": "rloo", "reward_norm": "leave_one_out"}, [-2, 2, -6, 6]),
        ({"preset": "dr-grpo", "adv_estimator": "grpo"}, [-1, 1, -3, 3]),
    ],
    ids=str,
)
def test_rewards_are_normalised_as_the_keys_say(keys: dict[str, Any], expected: list[float]) -> None:
    keys = {"adv_estimator": "reinforce", "reward_norm": "group", **keys}
    advantaged = with_advantages(rows(), AlgorithmConfig.model_validate(keys), RunningMoments())
    assert [row.advantage for row in advantaged[:4]] == pytest.approx(expected, rel=1e-5)
    assert advantaged[4].advantage is None


def test_running_moments_go_on_over_steps_and_a_replay_takes_them_in() -> None:
    algorithm = AlgorithmConfig.model_validate({"adv_estimator": "reinforce", "reward_norm": "running"})
    trained, replayed = RunningMoments(), RunningMoments()
    for rewards in (REWARDS, (0.0, 10.0, 4.0, 6.0)):
        advantaged = with_advantages(rows(rewards), algorithm, trained)
        update_moments(replayed, rows(rewards), algorithm)
    assert trained == replayed
    assert (trained.count, trained.mean) == (8, 5.0)
    # All eight: squared deviations 16, 4, 0, 36, 25, 25, 1, 1.
    std = (108 / 7) ** 0.5
    assert [row.advantage for row in advantaged[:4]] == pytest.approx([-5 / std, 5 / std, -1 / std, 1 / std], rel=1e-5)


def test_the_order_in_which_rows_come_changes_nothing() -> None:
    original = rows()
    placements = [
        [
            (row.group, row.number, row.mini_batch)
            for row in in_training_order(shuffled, seed=3, step=2, num_mini_batches=2)
        ]
        for shuffled in (original, original[::-1], original[2:] + original[:2])
    ]
    assert placements[0] == placements[1] == placements[2]
