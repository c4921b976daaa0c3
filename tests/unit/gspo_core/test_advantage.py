"""Rewards to advantages: every norm by hand, groups in any order, zero spread, return-to-go, whitening."""

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.common.score_numbers import LARGEST_NUMBER
from gspo_core.advantage import (
    LARGEST_REWARD,
    RunningMoments,
    groups_with_spread,
    normalize_rewards,
    overlong_penalty,
    rediscounted_penalty,
    token_advantages,
)

REWARDS = torch.tensor([1.0, 4.0, 3.0, 8.0])
GROUPS = torch.tensor([7, 2, 7, 2])  # group 7: 1 and 3, group 2: 4 and 8
ROOT2 = math.sqrt(2)


def test_group_norm() -> None:
    r_B = normalize_rewards(REWARDS, GROUPS, reward_norm="group")  # std sqrt(2) and 2 sqrt(2), means 2 and 6
    torch.testing.assert_close(r_B, torch.tensor([-1.0, -1.0, 1.0, 1.0]) / ROOT2, rtol=2e-6, atol=0)


def test_group_shift_and_scale() -> None:
    shifted_B = normalize_rewards(REWARDS, GROUPS, reward_norm="group", reward_shift=True)
    torch.testing.assert_close(shifted_B, torch.tensor([-1.0, -2.0, 1.0, 2.0]))
    scaled_B = normalize_rewards(REWARDS, GROUPS, reward_norm="group", reward_scale=True)
    torch.testing.assert_close(scaled_B, torch.tensor([1.0, 2.0, 3.0, 4.0]) / ROOT2, rtol=2e-6, atol=0)


def test_leave_one_out_is_the_shift_by_the_group_times_its_size_over_the_others() -> None:
    rewards_B, group_B = torch.tensor([1.0, 0.0, 0.0, 5.0, 2.0]), torch.tensor([3, 3, 3, 3, 1])
    left_out_B = normalize_rewards(rewards_B, group_B, reward_norm="leave_one_out")
    expected = [1 - 5 / 3, 0 - 6 / 3, 0 - 6 / 3, 5 - 1 / 3, 0.0]  # one reward alone has no other to compare with
    torch.testing.assert_close(left_out_B, torch.tensor(expected))
    shifted_B = normalize_rewards(rewards_B, group_B, reward_norm="group", reward_shift=True)
    torch.testing.assert_close(left_out_B, shifted_B * torch.tensor([4 / 3, 4 / 3, 4 / 3, 4 / 3, 1.0]))


def test_batch_norm() -> None:
    r_B = normalize_rewards(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 2]), reward_norm="batch")
    torch.testing.assert_close(r_B, torch.tensor([-1.0, 0.0, 1.0]), rtol=2e-6, atol=0)


def test_no_norm_leaves_rewards_and_clips_them() -> None:
    assert normalize_rewards(REWARDS, GROUPS, reward_norm=None).tolist() == [1, 4, 3, 8]
    assert normalize_rewards(-REWARDS, GROUPS, reward_norm=None, reward_clip=3.5).tolist() == [-1, -3.5, -3, -3.5]


def test_clip_comes_after_the_norm() -> None:
    r_B = normalize_rewards(REWARDS, GROUPS, reward_norm="group", reward_clip=0.5)
    assert r_B.tolist() == [-0.5, -0.5, 0.5, 0.5]


def test_running_norm_takes_in_the_batch_first() -> None:
    moments = RunningMoments()
    groups_B = torch.tensor([0, 0])
    first_B = normalize_rewards(torch.tensor([1.0, 3.0]), groups_B, reward_norm="running", moments=moments)
    torch.testing.assert_close(first_B, torch.tensor([-1.0, 1.0]) / ROOT2, rtol=2e-6, atol=0)
    second_B = normalize_rewards(torch.tensor([5.0, 7.0]), groups_B, reward_norm="running", moments=moments)
    std = math.sqrt(20 / 3)  # of 1, 3, 5, 7, mean 4
    torch.testing.assert_close(second_B, torch.tensor([1.0, 3.0]) / std, rtol=2e-6, atol=0)
    assert moments == RunningMoments(count=4, mean=4.0, square_deviation=20.0, minimum=1.0, maximum=7.0)


def test_running_moments_survive_json_also_when_empty() -> None:
    for rewards in ([], [0.25, 0.5]):
        moments = RunningMoments()
        moments.update(torch.tensor(rewards))
        assert RunningMoments(**json.loads(json.dumps(asdict(moments), allow_nan=False))) == moments


@pytest.mark.parametrize("kind", ["group", "batch", "running"])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [3.0], [0.0, 0.0]])
@pytest.mark.parametrize("option", [{}, {"reward_shift": True}, {"reward_scale": True}])
def test_zero_spread_and_single_values_give_exactly_zero(
    kind: str, rewards: list[float], option: dict[str, Any]
) -> None:
    r_B = torch.tensor(rewards)
    group_B = torch.zeros(len(rewards), dtype=torch.long)
    result_B = normalize_rewards(r_B, group_B, reward_norm=kind, moments=RunningMoments(), **option)
    assert result_B.tolist() == [0.0] * len(rewards)


def test_one_flat_group_does_not_silence_another() -> None:
    rewards_B = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1])
    group_B = torch.tensor([5, 1, 5, 1, 5])
    r_B = normalize_rewards(rewards_B, group_B, reward_norm="group")
    torch.testing.assert_close(r_B, torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0]) / ROOT2, rtol=2e-6, atol=0)
    assert groups_with_spread(rewards_B, group_B).tolist() == [True, False]  # in the order of the ids: 1, 5


@given(st.permutations(range(6)), st.permutations([10, 20, -30]))
def test_group_ids_and_row_order_do_not_matter(order: list[int], ids: list[int]) -> None:
    rewards_B = torch.tensor([0.0, 1.0, 2.0, 5.0, 0.3, 0.4])
    plain_B = normalize_rewards(rewards_B, torch.tensor([0, 0, 1, 1, 2, 2]), reward_norm="group")
    renamed_B = torch.tensor([ids[0], ids[0], ids[1], ids[1], ids[2], ids[2]])
    shuffled_B = normalize_rewards(rewards_B[list(order)], renamed_B[list(order)], reward_norm="group")
    torch.testing.assert_close(shuffled_B, plain_B[list(order)])


def test_normalize_refusals() -> None:
    both: dict[str, Any] = {"reward_shift": True, "reward_scale": True}
    with pytest.raises(ValueError, match="reward_shift and reward_scale are both true"):
        normalize_rewards(REWARDS, GROUPS, reward_norm="group", **both)
    with pytest.raises(ValueError, match="reward_norm None"):
        normalize_rewards(REWARDS, GROUPS, reward_norm=None, reward_shift=True)
    with pytest.raises(ValueError, match="moments None"):
        normalize_rewards(REWARDS, GROUPS, reward_norm="running")
    with pytest.raises(ValueError, match="reward_norm is 'grup'"):
        normalize_rewards(REWARDS, GROUPS, reward_norm="grup")
    with pytest.raises(ValueError, match="reward_clip is 0"):
        normalize_rewards(REWARDS, GROUPS, reward_norm=None, reward_clip=0)
    with pytest.raises(ValueError, match=r"group_B has shape \(3,\)"):
        normalize_rewards(REWARDS, GROUPS[:3], reward_norm="group")
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            normalize_rewards(torch.tensor([1.0, bad]), torch.tensor([0, 0]), reward_norm="group")
    with pytest.raises(ValueError, match=r"holds 1e\+308; at most 1e\+30 has finite sums"):
        normalize_rewards(torch.tensor([1e308, 1e308], dtype=torch.float64), torch.tensor([0, 0]), reward_norm="group")


@pytest.mark.parametrize("reward_norm", ["group", "batch", "running", "leave_one_out", None])
def test_the_largest_rewards_have_finite_advantages(reward_norm: str | None) -> None:
    rewards_B, group_B = torch.tensor([LARGEST_REWARD, -LARGEST_REWARD, 0.0]), torch.tensor([0, 0, 0])
    advantages_B = normalize_rewards(rewards_B, group_B, reward_norm=reward_norm, moments=RunningMoments())
    assert advantages_B.isfinite().all()
    assert advantages_B[0] > 0 > advantages_B[1]


def test_services_and_mathematics_have_one_bound() -> None:
    assert LARGEST_REWARD == LARGEST_NUMBER


def test_the_overlong_penalty_is_linear_in_the_buffer() -> None:
    length_B = torch.tensor([1, 80, 81, 90, 100, 130])
    penalty_B = overlong_penalty(length_B, response_length=100, buffer=20, penalty=0.5)
    assert penalty_B.tolist() == pytest.approx([0, 0, 0.025, 0.25, 0.5, 0.5])
    whole_B = overlong_penalty(torch.tensor([0, 25, 100]), response_length=100, buffer=100, penalty=1.0)
    assert whole_B.tolist() == [0, 0.25, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer": 0}, "buffer is 0"),
        ({"buffer": 101}, "buffer is 101; it must be from 1 to response_length, 100"),
        ({"penalty": -1.0}, r"penalty is -1\.0"),
    ],
)
def test_overlong_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor([3]), **{"response_length": 100, "buffer": 10, "penalty": 1.0} | change)


MASK = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])


def test_reward_reaches_every_policy_token_and_no_other() -> None:
    A_BT = token_advantages(torch.tensor([2.0, -1.0, 5.0]), MASK)
    assert A_BT.tolist() == [[0, 2, 2, 0, 2, 0], [-1, -1, 0, 0, 0, 0], [0] * 6]


def test_penalty_and_discount_count_policy_tokens() -> None:
    penalty_BT = torch.full((3, 6), 9.0)  # what stands outside the mask must not matter
    penalty_BT[0, [1, 2, 4]] = torch.tensor([0.5, 0.25, 1.0])
    penalty_BT[1, :2] = 0.0
    A_BT = token_advantages(torch.tensor([2.0, -1.0, 5.0]), MASK, token_penalty_BT=penalty_BT, gamma=0.5)
    # row 0 from the end: 2 - 1 = 1; -0.25 + 0.5 * 1 = 0.25; -0.5 + 0.5 * 0.25 = -0.375
    assert A_BT.tolist() == [[0, -0.375, 0.25, 0, 1, 0], [-0.5, -1, 0, 0, 0, 0], [0] * 6]
    undiscounted_BT = token_advantages(torch.tensor([2.0, -1.0, 5.0]), MASK, token_penalty_BT=penalty_BT)
    assert undiscounted_BT[0].tolist() == [0, 0.25, 0.75, 0, 1, 0]


def test_whitening_and_clip_by_hand() -> None:
    A_BT = token_advantages(torch.tensor([1.0, 3.0]), torch.tensor([[1, 0], [1, 1]]), whiten_advantages=True)
    # 1, 3, 3: mean 7/3, unbiased variance 4/3
    low, high = (1 - 7 / 3) / math.sqrt(4 / 3), (3 - 7 / 3) / math.sqrt(4 / 3)
    torch.testing.assert_close(A_BT, torch.tensor([[low, 0.0], [high, high]]))
    clipped_BT = token_advantages(
        torch.tensor([1.0, 3.0]), torch.tensor([[1, 0], [1, 1]]), whiten_advantages=True, advantage_clip=0.6
    )
    torch.testing.assert_close(clipped_BT, torch.tensor([[-0.6, 0.0], [high, high]]))


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_whitening_without_spread_gives_zero(num_tokens: int) -> None:
    mask_BT = (torch.arange(6) < num_tokens)[None]
    assert token_advantages(torch.tensor([0.1]), mask_BT, whiten_advantages=True).tolist() == [[0.0] * 6]


def test_token_advantage_refusals() -> None:
    with pytest.raises(ValueError, match=r"mask_BT has shape \(.*\), rewards_B has"):
        token_advantages(torch.zeros(2), MASK)
    with pytest.raises(ValueError, match="token_penalty_BT has shape"):
        token_advantages(torch.zeros(3), MASK, token_penalty_BT=torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        token_advantages(torch.zeros(3), MASK, gamma=1.5)
    with pytest.raises(ValueError, match=r"own_gamma is -0\.1"):
        rediscounted_penalty(torch.zeros_like(MASK).double(), MASK, own_gamma=-0.1, gamma=1.0)
    with pytest.raises(ValueError, match="advantage_clip is -1"):
        token_advantages(torch.zeros(3), MASK, advantage_clip=-1)
