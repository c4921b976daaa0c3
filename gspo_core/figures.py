"""The figures of a step beside its loss: mismatch between engines, what noise does to the clip, spread, ages.

Not a metrics client: names and numbers only; the learner gives them to its log, its terminal and Prometheus.
"""

import math

import torch
from torch import Tensor

from gspo_core.advantage import groups_with_spread
from gspo_core.loss import sequence_log_ratio
from gspo_core.shapes import check_matrix
from gspo_core.staleness import rollout_age, token_age
from gspo_core.stats import Stats, mean_stats, moment_stats


def mismatch_stats(learner_logp_BT: Tensor, behavior_logp_BT: Tensor, mask_BT: Tensor) -> Stats:
    """How far the learner's log-probs are from the inference engine's, at the same weights.

    `mask_BT` must hold only tokens whose version is the learner's (staleness.drop_old_tokens with age 0): else
    this measures drift. Figures: mismatch (per token) and sequence_mismatch (per sequence mean), whose `_std`
    are the two sigmas. All tensors [B, T].
    """
    check_matrix(learner_logp_BT=learner_logp_BT, behavior_logp_BT=behavior_logp_BT, mask_BT=mask_BT)
    m_BT = mask_BT.bool()
    delta_BT = learner_logp_BT.detach().double() - behavior_logp_BT.detach().double()
    mean_B = sequence_log_ratio(learner_logp_BT.detach(), behavior_logp_BT.detach(), mask_BT)
    return {
        **moment_stats("mismatch", delta_BT, m_BT),
        **moment_stats("sequence_mismatch", mean_B, m_BT.any(-1)),
    }


def noise_share(sigma_B: Tensor, *, pg_clip_low: float, pg_clip_high: float) -> Tensor:
    """Share of sequences that noise alone puts outside the clip, with no change of the policy at all.

        1/B sum_i P(log s < log(1 - pg_clip_low)) + P(log s > log(1 + pg_clip_high)),  log s ~ N(0, sigma_i^2)

    `sigma_B` [B] is the noise of each sequence's log-ratio: `independent_sigma`, or the measured std of
    sequence_mismatch, which also sees noise that the tokens of a sequence share. Report both: where the second is
    far larger, the noise is not averaged away by length. Returns a 0-dim float64 in [0, 1].
    """
    if sigma_B.numel() == 0:
        return torch.zeros((), dtype=torch.float64)
    root2_sigma_B = sigma_B.detach().double().clamp(min=1e-12) * math.sqrt(2.0)
    below = -math.log1p(-pg_clip_low) if pg_clip_low < 1 else math.inf
    above = math.log1p(pg_clip_high)
    outside_B = torch.erfc(below / root2_sigma_B) / 2 + torch.erfc(above / root2_sigma_B) / 2
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


def age_stats(version_BT: Tensor, mask_BT: Tensor, learner_version: int) -> Stats:
    """Figures in versions: token_age over policy tokens and rollout_age over rollouts that have any. [B, T] both."""
    m_BT = mask_BT.bool()
    return {
        **moment_stats("token_age", token_age(version_BT, mask_BT, learner_version), m_BT),
        **moment_stats("rollout_age", rollout_age(version_BT, mask_BT, learner_version), m_BT.any(-1)),
    }
