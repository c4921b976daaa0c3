"""Rewards to advantages: lower for length; normalise per group, batch or run; place on tokens; whiten; clip.

Not here: scoring, and which rollouts count. Rollouts to skip are absent from the rows (or have an empty mask).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_core.shapes import checked_shapes

NORM_EPS = 1e-6
WHITEN_EPS = 1e-8
# float32 holds sums of a hundred million such rewards, and float64 sums of their squares.
LARGEST_REWARD = 1e30
REWARD_NORMS = ("group", "batch", "running", "leave_one_out", None)


@dataclass
class RunningMoments:
    """Mean and spread of all rewards so far (Welford's recurrence). Plain numbers: asdict() fits into JSON.

    count = n, mean = sum x / n, square_deviation = sum (x - mean)^2; minimum and maximum are 0 while n is 0.
    """

    count: int = 0
    mean: float = 0.0
    square_deviation: float = 0.0
    minimum: float = 0.0
    maximum: float = 0.0

    def update(self, rewards_B: Tensor) -> None:
        """Take in rewards [B], in row order: n += 1, d = x - mean, mean += d / n, S += d (x - mean)."""
        for x in rewards_B.to(torch.float64).tolist():
            self.minimum = min(x, self.minimum) if self.count else x
            self.maximum = max(x, self.maximum) if self.count else x
            self.count += 1
            d = x - self.mean
            self.mean += d / self.count
            self.square_deviation += d * (x - self.mean)

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 where there is no spread."""
        if self.minimum == self.maximum:
            return 0.0
        return math.sqrt(self.square_deviation / (self.count - 1))


@checked_shapes
def normalize_rewards(
    rewards_B: Tensor,
    group_B: Tensor,
    *,
    reward_norm: str | None,
    reward_shift: bool = False,
    reward_scale: bool = False,
    reward_clip: float | None = None,
    moments: RunningMoments | None = None,
) -> Tensor:
    """(r - mean) / (std + 1e-6) over the reward's group, the batch, or all rewards so far; then the clip.

    `rewards_B` and `group_B` are [B]; group ids are integers in any order. std is unbiased. `reward_norm`:
    "group", "batch", "running" (updates `moments` in place first, then uses them), "leave_one_out" (only subtracts
    the mean of the other rewards in the group: RLOO, arXiv 2402.14740, eq. 7) or None (rewards as they are).
    `reward_shift` only subtracts the mean, `reward_scale` only divides by std + 1e-6. One value alone, or zero
    spread (maximum equals minimum), gives 0. `reward_clip` clamps the result to +-reward_clip.
    Returns [B] in float32 (float64 if the rewards are).
    ValueError: shapes, an unknown norm, shift with scale, either without a norm or with leave_one_out, running
    without moments, a reward that is not finite (a failed score is to be left out, it is never a number) or beyond
    +-LARGEST_REWARD.
    """
    _check_reward_options(reward_norm, reward_shift, reward_scale, reward_clip, moments)
    if not bool(torch.isfinite(rewards_B).all()):
        raise ValueError("rewards_B holds values that are not finite; leave failed rollouts out of the batch")
    if bool((rewards_B.abs() > LARGEST_REWARD).any()):
        largest = float(rewards_B.abs().max())
        raise ValueError(f"rewards_B holds {largest:g}; at most {LARGEST_REWARD:g} has finite sums")
    r_B = rewards_B.to(torch.float64)  # few numbers; seven float32 rewards of 0.1 must have mean 0.1
    if reward_norm is not None:
        mean_B, std_B, spread_B = _mean_std_spread(r_B, group_B, reward_norm, moments)
        centred_B = r_B if reward_scale else r_B - mean_B
        is_scaled = not reward_shift and reward_norm != "leave_one_out"
        scaled_B = centred_B / (std_B + NORM_EPS) if is_scaled else centred_B
        r_B = torch.where(spread_B, scaled_B, 0.0)
    if reward_clip is not None:
        r_B = r_B.clamp(-reward_clip, reward_clip)
    return r_B.to(torch.promote_types(rewards_B.dtype, torch.float32))


@checked_shapes
def groups_with_spread(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """For each distinct group, whether its largest reward differs from its smallest. Bool [number of groups]."""
    _, index_B, count_G = torch.unique(group_B, return_inverse=True, return_counts=True)
    return _has_spread(rewards_B.to(torch.float64), index_B, len(count_G))


@checked_shapes
def overlong_penalty(length_B: Tensor, *, response_length: int, buffer: int, penalty: float) -> Tensor:
    """Penalty of an answer's reward for its length, linear within the buffer before response_length.

        0                                                    where L <= response_length - buffer
        penalty * (L - (response_length - buffer)) / buffer  beyond, at most `penalty`

    `length_B` [B] in tokens; returns [B] in float64, from 0 to `penalty`. Source: DAPO, arXiv 2503.14476, eq. 13.
    ValueError: a buffer below 1 or longer than response_length, a penalty that is negative.
    """
    if not 1 <= buffer <= response_length:
        raise ValueError(f"buffer is {buffer}; it must be from 1 to response_length, {response_length}")
    if not 0 <= penalty < math.inf:
        raise ValueError(f"penalty is {penalty}; it must be finite and at least 0")
    over_B = length_B.to(torch.float64) - (response_length - buffer)
    return penalty * (over_B / buffer).clamp(0.0, 1.0)


@checked_shapes
def token_advantages(
    rewards_B: Tensor,
    mask_BT: Tensor,
    *,
    token_penalty_BT: Tensor | None = None,
    gamma: float = 1.0,
    whiten_advantages: bool = False,
    advantage_clip: float | None = None,
) -> Tensor:
    """Return-to-go of every policy token: A_t = r_t - penalty_t + gamma A_next, next the following policy token.

    r_t is the row's reward on its last policy token and 0 before. Tokens that are not the policy's are no step of
    it: a tool's long answer costs no discount. `token_penalty_BT` is such as kl_coef * k1(old, ref).
    Then, over all policy tokens of the batch: whiten (A - mean) / sqrt(var + 1e-8), var unbiased, 0 where there
    is no spread; then clamp to +-advantage_clip.
    `rewards_B` [B], `mask_BT` [B, T]; returns [B, T] in float32 (float64 if the rewards are), 0 outside the mask.
    ValueError: shapes, gamma outside [0, 1], advantage_clip not above 0.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}; it must be in [0, 1]")
    _check_bound("advantage_clip", advantage_clip)
    m_BT = mask_BT.bool()
    r_BT = _reward_on_last_token(rewards_B.to(torch.float64), m_BT)
    if token_penalty_BT is not None:
        r_BT = r_BT - torch.where(m_BT, token_penalty_BT.to(torch.float64), 0.0)
    A_BT = torch.where(m_BT, _return_to_go(r_BT, m_BT, gamma), 0.0)
    if whiten_advantages:
        A_BT = _whiten(A_BT, m_BT)
    if advantage_clip is not None:
        A_BT = A_BT.clamp(-advantage_clip, advantage_clip)
    return A_BT.to(torch.promote_types(rewards_B.dtype, torch.float32))


@checked_shapes
def rediscounted_penalty(penalty_BT: Tensor, mask_BT: Tensor, *, own_gamma: float, gamma: float) -> Tensor:
    """The token penalty whose return-to-go by gamma is that of `penalty_BT` by `own_gamma`.

        P_t = penalty_t + own_gamma P_next, and P_t - gamma P_next is returned; next as in `token_advantages`

    So rewards and a penalty may have discounts of their own: with own_gamma 0, a token answers for its penalty alone.
    Both [B, T]; returns [B, T] in float64, 0 outside the mask. ValueError: shapes, own_gamma outside [0, 1].
    """
    if not 0.0 <= own_gamma <= 1.0:
        raise ValueError(f"own_gamma is {own_gamma}; it must be in [0, 1]")
    m_BT, moved_BT = mask_BT.bool(), torch.zeros_like(penalty_BT, dtype=torch.float64)
    P_next_B = moved_BT.new_zeros(len(moved_BT))
    for t in reversed(range(moved_BT.shape[1])):
        P_B = penalty_BT[:, t].double() + own_gamma * P_next_B
        moved_BT[:, t] = torch.where(m_BT[:, t], P_B - gamma * P_next_B, 0.0)
        P_next_B = torch.where(m_BT[:, t], P_B, P_next_B)
    return moved_BT


def _check_reward_options(
    reward_norm: str | None,
    reward_shift: bool,
    reward_scale: bool,
    reward_clip: float | None,
    moments: RunningMoments | None,
) -> None:
    if reward_norm not in REWARD_NORMS:
        raise ValueError(f"reward_norm is {reward_norm!r}; it must be one of {REWARD_NORMS}")
    if reward_shift and reward_scale:
        raise ValueError("reward_shift and reward_scale are both true; leave both false to do both")
    if reward_norm is None and (reward_shift or reward_scale):
        raise ValueError("reward_shift or reward_scale is true and reward_norm None; choose a reward_norm")
    if reward_norm == "leave_one_out" and (reward_shift or reward_scale):
        raise ValueError("reward_shift or reward_scale is true and reward_norm 'leave_one_out', which only shifts")
    if reward_norm == "running" and moments is None:
        raise ValueError("reward_norm is 'running' and moments None; pass the run's RunningMoments")
    _check_bound("reward_clip", reward_clip)


def _check_bound(name: str, bound: float | None) -> None:
    if bound is not None and not bound > 0:
        raise ValueError(f"{name} is {bound}; it must be above 0, or None for no clip")


def _mean_std_spread(
    r_B: Tensor, group_B: Tensor, reward_norm: str, moments: RunningMoments | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased std and whether there is spread, each [B], of the population each reward belongs to.

    Under leave_one_out the mean is that of the other n - 1 rewards: mean - (r - mean) / (n - 1).
    """
    if reward_norm == "running" and moments is not None:
        moments.update(r_B)
        spread_B = torch.full_like(r_B, moments.std).bool()
        return torch.full_like(r_B, moments.mean), torch.full_like(r_B, moments.std), spread_B
    if reward_norm == "batch":
        group_B = torch.zeros_like(group_B)
    _, index_B, count_G = torch.unique(group_B, return_inverse=True, return_counts=True)
    sum_G = torch.zeros_like(count_G, dtype=r_B.dtype)
    mean_B = (sum_G.index_add(0, index_B, r_B) / count_G)[index_B]
    square_G = sum_G.index_add(0, index_B, (r_B - mean_B).square())
    others_G = (count_G - 1).clamp(min=1)
    if reward_norm == "leave_one_out":
        mean_B = mean_B - (r_B - mean_B) / others_G[index_B]
    std_G = (square_G / others_G).sqrt()
    return mean_B, std_G[index_B], _has_spread(r_B, index_B, len(count_G))[index_B]


def _has_spread(r_B: Tensor, index_B: Tensor, num_groups: int) -> Tensor:
    """Maximum differs from minimum; a std of equal rewards is not always 0, so it cannot decide. Bool [groups]."""
    empty_G = r_B.new_zeros(num_groups)
    max_G = empty_G.scatter_reduce(0, index_B, r_B, "amax", include_self=False)
    min_G = empty_G.scatter_reduce(0, index_B, r_B, "amin", include_self=False)
    return max_G != min_G


def _reward_on_last_token(r_B: Tensor, m_BT: Tensor) -> Tensor:
    remaining_BT = m_BT.flip(-1).cumsum(-1).flip(-1)
    last_BT = m_BT & (remaining_BT == 1)
    return torch.where(last_BT, r_B[:, None], 0.0)


def _return_to_go(r_BT: Tensor, m_BT: Tensor, gamma: float) -> Tensor:
    if gamma == 1.0:
        return r_BT.flip(-1).cumsum(-1).flip(-1)
    A_BT = torch.zeros_like(r_BT)
    A_next_B = r_BT.new_zeros(len(r_BT))
    for t in reversed(range(r_BT.shape[1])):
        A_next_B = torch.where(m_BT[:, t], r_BT[:, t] + gamma * A_next_B, A_next_B)
        A_BT[:, t] = A_next_B
    return A_BT


def _whiten(A_BT: Tensor, m_BT: Tensor) -> Tensor:
    A_N = A_BT[m_BT]
    if A_N.numel() == 0 or bool(A_N.max() == A_N.min()):
        return torch.zeros_like(A_BT)
    white_BT = (A_BT - A_N.mean()) * torch.rsqrt(A_N.var() + WHITEN_EPS)
    return torch.where(m_BT, white_BT, 0.0)
