"""The figures of a step beside its loss: mismatch between engines, what noise does to the clip, spread, ages.

Not a metrics client: names and numbers only; the learner gives them to its log, its terminal and Prometheus.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_core.advantage import groups_with_spread
from gspo_core.branches import at_tokens, lengths_of_sequences, means_of_sequences, sums_of_sequences
from gspo_core.loss import clip_sides
from gspo_core.shapes import check_matrix
from gspo_core.staleness import rollout_age, token_age
from gspo_core.stats import Stats, figures, mean_stats, moment_stats

# Bounds of a clip's side in `noise_clip`, and halvings of the range between their logarithms: 1e-13 of the result.
_NARROWEST, _WIDEST, _HALVINGS = 1e-9, 1e9, 50


def mismatch_stats(
    learner_logp_BT: Tensor, behavior_logp_BT: Tensor, mask_BT: Tensor, branch_BT: Tensor | None = None
) -> Stats:
    """How far the learner's log-probs are from the inference engine's, at the same weights.

    `mask_BT` must hold only tokens whose version is the learner's (staleness.drop_old_tokens with age 0): else
    this measures drift. Figures: mismatch (per token) and sequence_mismatch (per sequence mean), whose `_std`
    are the two sigmas, and the sums that `sequence_noise` needs. All tensors [B, T].
    With `branch_BT`, as of `loss.policy_loss`, sequences are branches.
    """
    check_matrix(learner_logp_BT=learner_logp_BT, behavior_logp_BT=behavior_logp_BT, mask_BT=mask_BT)
    m_BT = mask_BT.bool()
    delta_BT = torch.where(m_BT, learner_logp_BT.detach().double() - behavior_logp_BT.detach().double(), 0.0)
    mean_BK = means_of_sequences(delta_BT, m_BT, branch_BT)
    from_mean_BT = torch.where(m_BT, delta_BT - at_tokens(mean_BK, m_BT, branch_BT), 0.0)
    length_BK = lengths_of_sequences(m_BT, branch_BT)
    return {
        **moment_stats("mismatch", delta_BT, m_BT),
        **moment_stats("sequence_mismatch", mean_BK, length_BK > 0),
        **mean_stats("mismatch_within", sums_of_sequences(from_mean_BT.square(), branch_BT), length_BK > 0),
        **mean_stats("mismatch_inverse_length", 1 / length_BK.clamp(min=1), length_BK > 0),
    }


class SequenceNoise(NamedTuple):
    """The engines' noise of a sequence's log-ratio: normal, with this mean and std sqrt(shared^2 + token^2 / L_i).

    `token` is the std of the part that is independent in each token, `shared` of the part that a sequence's tokens
    have in common, which no length averages out.
    """

    mean: float
    shared: float
    token: float

    def sigma(self, length_B: Tensor) -> Tensor:
        """The std for sequences of L_i = `length_B` tokens, [B] float64; 0 where L_i is 0."""
        variance_B = self.shared**2 + self.token**2 / length_B.clamp(min=1).double()
        return torch.where(length_B > 0, variance_B.sqrt(), 0.0)


def sequence_noise(stats: Stats) -> SequenceNoise:
    """The noise model of the compared sequences, from `mismatch_stats`: a one-way analysis of variance.

        token^2  = sum_i sum_t (x_it - x_i)^2 / (N - S)
        shared^2 = max(0, var_i(x_i) - token^2 mean_i(1 / L_i)),    x_i the mean of sequence i

    N tokens in S sequences. Sequences of one token each do not show which part is shared: all of it is the token's.
    """
    seen = figures(stats)
    num_tokens, num_sequences = float(stats["mismatch.count"]), float(stats["sequence_mismatch.count"])
    between = seen["sequence_mismatch_std"] ** 2
    if num_tokens <= num_sequences:
        return SequenceNoise(seen["mismatch_mean"], 0.0, math.sqrt(between))
    token = float(stats["mismatch_within.sum"]) / (num_tokens - num_sequences)
    shared = max(0.0, between - token * seen["mismatch_inverse_length"])
    return SequenceNoise(seen["mismatch_mean"], math.sqrt(shared), math.sqrt(token))


def noise_share(
    sigma_B: Tensor, *, pg_clip_low: float | Tensor, pg_clip_high: float | Tensor, mean: float = 0.0
) -> Tensor:
    """Share of sequences that noise alone puts outside the clip, with no change of the policy at all.

        1/B sum_i P(log s < log(1 - low_i)) + P(log s > log(1 + high_i)),  log s ~ N(mean, sigma_i^2)

    `sigma_B` [B] is the noise of each sequence's log-ratio, by `sequence_noise` or `independent_sigma`. Report both:
    where the first is far larger, the tokens of a sequence share their noise, and length does not average it out.
    The sides are one for all sequences, or [B]: those of `clip_sides`. Returns a 0-dim float64 in [0, 1].
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


def noise_clip(
    sigma_B: Tensor,
    length_B: Tensor,
    *,
    share: float = 0.01,
    mean: float = 0.0,
    pg_clip_reference_length: float | None = None,
) -> float:
    """The side of the clip, the same below and above, at which noise alone puts `share` of the sequences outside.

    It inverts `noise_share`, by halving. With `pg_clip_reference_length`, the side for sequences of that length.
    `sigma_B`, `length_B` [B]; returns 0 without noise. ValueError: a share outside (0, 1).
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share}; it must be between 0 and 1")
    if not bool((sigma_B > 0).any()):
        return 0.0
    narrow, wide = math.log(_NARROWEST), math.log(_WIDEST)
    for _ in range(_HALVINGS):
        middle = (narrow + wide) / 2
        low_B, high_B = clip_sides(length_B, math.exp(middle), math.exp(middle), pg_clip_reference_length)
        outside = float(noise_share(sigma_B, pg_clip_low=low_B, pg_clip_high=high_B, mean=mean))
        narrow, wide = (middle, wide) if outside > share else (narrow, middle)
    return math.exp(wide)


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
