"""The figures of a step: ratios and clipped shares, mismatch between engines, what noise does to the clip, spread.

Not a metrics client: names and numbers only; the learner gives them to its log, its terminal and Prometheus.
"""

import math

import torch
from torch import Tensor

from gspo_core.advantage import groups_with_spread
from gspo_core.kl import kl_divergence
from gspo_core.shapes import checked_shapes
from gspo_core.stats import Stats, mean_stats, moment_stats
from gspo_core.token_losses import (
    SampledTokens,
    TokenLoss,
    clip_scale,
    clip_sides,
    lengths_of_sequences,
    means_of_sequences,
)

# Sides of a clip at which `noise_stats` counts: a hundred for each power of ten, so 2.3 % from one to the next.
_SIDES = torch.logspace(-9, 3, 1201, dtype=torch.float64)
_BEYOND = "noise_beyond_side.sum"  # sequences outside each of these sides


@torch.no_grad()
def policy_stats(tokens: SampledTokens, of_tokens: TokenLoss) -> Stats:
    """Sums for stats.merge and figures: those of `ratio_stats`, and what the objective's bounds change.

    clipped_{low,high}_{sequences,tokens}: share that the objective's bound changes, on either side; a sequence counts
        when any of its tokens does. Under cispo the weight is bounded, under the others the gradient is 0.
    outside_clip_sequences: share beyond a bound for any A; the figure to hold against noise_share.
    dual_clipped_tokens: share cut by the dual clip.

    With branches, sequences are branches.
    """
    m_BT, branch_BT = tokens.mask_BT, tokens.branch_BT
    changed_BT = {
        "clipped_low": of_tokens.cut_low_BT,
        "clipped_high": of_tokens.cut_high_BT,
        "outside_clip": of_tokens.below_BT | of_tokens.above_BT,
    }
    changed_BK = {name: lengths_of_sequences(m_BT & x_BT, branch_BT) > 0 for name, x_BT in changed_BT.items()}
    valid_BK = lengths_of_sequences(m_BT, branch_BT) > 0
    stats = mean_stats("dual_clipped_tokens", of_tokens.dual_BT, m_BT)
    for name, x_BT in changed_BT.items():
        stats |= mean_stats(f"{name}_sequences", changed_BK[name], valid_BK)
        if name != "outside_clip":
            stats |= mean_stats(f"{name}_tokens", x_BT, m_BT)
    return stats | ratio_stats(tokens)


@torch.no_grad()
def ratio_stats(tokens: SampledTokens) -> Stats:
    """The stats that need no bound.

    log_ratio, token_log_ratio: mean, std, max over sequences (log s_i) and over tokens (delta_it).
    k1, k3: KL(old || policy), mean over tokens. advantage: mean, std, max over tokens.
    """
    delta_BT, m_BT, branch_BT = tokens.delta_BT, tokens.mask_BT, tokens.branch_BT
    k1_BT, k3_BT = (kl_divergence(-delta_BT, torch.zeros_like(delta_BT), kind) for kind in ("k1", "k3"))
    mean_BK, length_BK = means_of_sequences(delta_BT, m_BT, branch_BT), lengths_of_sequences(m_BT, branch_BT)
    return {
        **moment_stats("log_ratio", mean_BK, length_BK > 0),
        **moment_stats("token_log_ratio", delta_BT, m_BT),
        **mean_stats("k1", k1_BT, m_BT),
        **mean_stats("k3", k3_BT, m_BT),
        **moment_stats("advantage", tokens.A_BT, m_BT),
    }


def mismatch_stats(
    learner_logp_BT: Tensor, behavior_logp_BT: Tensor, mask_BT: Tensor, branch_BT: Tensor | None = None
) -> Stats:
    """How far the learner's log-probs are from the inference engine's, at the same weights.

    `mask_BT` must hold only tokens whose version is the learner's (staleness.drop_old_tokens with age 0): else
    this measures drift. Figures: mismatch (per token) and sequence_mismatch (per sequence mean), whose `_std`
    are the two sigmas. All tensors [B, T].
    With `branch_BT`, as of `loss.policy_loss`, sequences are branches.
    """
    delta_BT, m_BT = _mismatch(learner_logp_BT, behavior_logp_BT, mask_BT), mask_BT.bool()
    mean_BK = means_of_sequences(delta_BT, m_BT, branch_BT)
    return {
        **moment_stats("mismatch", delta_BT, m_BT),
        **moment_stats("sequence_mismatch", mean_BK, lengths_of_sequences(m_BT, branch_BT) > 0),
    }


@checked_shapes
def _mismatch(learner_logp_BT: Tensor, behavior_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """learner_it - behavior_it in float64, 0 outside the mask."""
    return torch.where(mask_BT.bool(), learner_logp_BT.detach().double() - behavior_logp_BT.detach().double(), 0.0)


def noise_stats(
    learner_logp_BT: Tensor,
    behavior_logp_BT: Tensor,
    mask_BT: Tensor,
    counted_BT: Tensor,
    *,
    importance_sampling: str,
    pg_clip_low: float,
    pg_clip_high: float,
    pg_clip_reference_length: float | None = None,
    branch_BT: Tensor | None = None,
) -> Stats:
    """The sequences that the mismatch alone puts outside the clip: the figure noise_share, and counts for `noise_clip`.

        x_i = sqrt(l_i / L_i) sum_t m_it (learner_it - behavior_it) / l_i,    outside where exp(x_i) is

    l_i of the L_i tokens of a sequence are compared; the others are taken to have independent noise of the same size.
    No distribution is assumed: most tokens of a peaked policy have almost no mismatch, and a few have nearly all of it.
    Under `importance_sampling: token`, each compared token is a sequence of its own.

    Args:
        mask_BT: The compared tokens, as for `mismatch_stats`; the other arguments are those of `loss.policy_loss`.
        counted_BT: All tokens that the loss counts.
    """
    x, m_BT = _mismatch(learner_logp_BT, behavior_logp_BT, mask_BT), mask_BT.bool()
    length, compared = torch.ones_like(x), m_BT
    if importance_sampling != "token":
        length, num_compared = (lengths_of_sequences(each_BT, branch_BT) for each_BT in (counted_BT, m_BT))
        compared = num_compared > 0
        x = means_of_sequences(x, m_BT, branch_BT) * (num_compared / length.clamp(min=1).double()).sqrt()
    low, high = clip_sides(length, pg_clip_low, pg_clip_high, pg_clip_reference_length)
    moved = torch.expm1(x)
    scale, sides = clip_scale(length, pg_clip_reference_length), _SIDES.to(x.device)
    first_side = torch.bucketize((moved.abs() / scale)[compared], sides)  # the narrowest side that holds each
    num_first = torch.bincount(first_side, minlength=len(sides) + 1).double()
    return {
        **mean_stats("noise_share", (moved < -low) | (moved > high), compared),
        _BEYOND: num_first.sum() - num_first.cumsum(0)[:-1],
    }


def noise_clip(stats: Stats, *, share: float = 0.01) -> float:
    """The side of the clip, the same below and above, at which noise alone puts at most `share` outside.

    With `pg_clip_reference_length`, the side for sequences of that length. Up to 2.3 % above the narrowest such side;
    0 without noise. Of n sequences fewer than 1 / share, it holds all.

    Args:
        stats: From `noise_stats`.

    Raises:
        ValueError: A share outside (0, 1).
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share}; it must be between 0 and 1")
    holds = stats[_BEYOND].cpu() <= share * float(stats["noise_share.count"])
    narrowest = int(holds.int().argmax()) if bool(holds.any()) else len(_SIDES) - 1
    return float(_SIDES[narrowest]) if narrowest else 0.0


def normal_noise_share(
    sigma_B: Tensor, *, pg_clip_low: float | Tensor, pg_clip_high: float | Tensor, mean: float = 0.0
) -> Tensor:
    """Share of sequences that normal noise puts outside the clip, with no change of the policy at all.

        1/B sum_i P(log s < log(1 - low_i)) + P(log s > log(1 + high_i)),  log s ~ N(mean, sigma_i^2)

    For planning, with `sigma_B` [B] by `independent_sigma`; what a run measures is in `noise_stats`. The sides are one
    for all sequences, or [B]: those of `clip_sides`. Returns a 0-dim float64 in [0, 1].
    """
    if sigma_B.numel() == 0:
        return torch.zeros((), dtype=torch.float64)
    root2_sigma_B = sigma_B.detach().double().clamp(min=1e-12) * math.sqrt(2.0)
    low_B, high_B = (
        torch.as_tensor(side, dtype=torch.float64, device=sigma_B.device) for side in (pg_clip_low, pg_clip_high)
    )
    below_B, above_B = mean - torch.log1p(-low_B), torch.log1p(high_B) - mean
    outside_B = torch.erfc(below_B / root2_sigma_B) / 2 + torch.erfc(above_B / root2_sigma_B) / 2
    return torch.where(sigma_B > 0, outside_B, 0.0).mean()


def independent_sigma(sigma_token: float, length_B: Tensor) -> Tensor:
    """sigma / sqrt(L_i): the noise of a mean over L_i tokens whose noise is independent. [B]; 0 where L_i is 0."""
    return torch.where(length_B > 0, sigma_token / length_B.clamp(min=1).double().sqrt(), 0.0)


def reward_stats(rewards_B: Tensor, group_B: Tensor) -> Stats:
    """Figures: reward (mean, std, max) and zero_spread_groups, the share of groups whose rewards are all equal."""
    spread_G = groups_with_spread(rewards_B, group_B)
    return {
        **moment_stats("reward", rewards_B, torch.ones_like(rewards_B)),
        **mean_stats("zero_spread_groups", ~spread_G, torch.ones_like(spread_G)),
    }
