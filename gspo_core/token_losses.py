"""The loss of each token, one function an objective, and what the bounds of that objective change.

    clip_loss     l_it = -min(ratio_it A_it, clipped_it A_it)
    cispo_loss    l_it = -sg[clipped_it] A_it logp_it
    dppo_loss     l_it = -ratio_it A_it, or 0

    clipped_it = clip(ratio_it, 1 - low, 1 + high)

    seq        ratio_it = s_i = exp(sequence_log_ratio)          GSPO
    token      ratio_it = exp(logp_it - old_it)                  GRPO
    seq_token  ratio_it = sg[s_i] pi_it / sg[pi_it]              GSPO-token: value of s_i, gradient per token

With branches, s_i becomes that of the token's branch k, over its L_ik tokens:

    s_ik = exp(sum_(t in k) m_it (logp_it - old_it) / L_ik)

`branch_BT` [B, T] is the number of each token's branch, from 0; None where a rollout is one sequence. Values of
sequences are [B, K], K the highest number of branches, 1 for None.

Not here: sums over tokens and sequences; loss.py has them.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from gspo_core.shapes import checked_shapes

IMPORTANCE_SAMPLINGS = ("seq", "token", "seq_token")
# exp(60) = 1e26: sums of it over a batch stay finite in float32. No ratio that means anything is near it.
LOG_RATIO_LIMIT = 60.0
# exp(-this) is 1 in float64, so that the rest of the distribution never has probability 0.
_LEAST_SURPRISE = 1e-12
# One for all tokens, or one for each: [B, T].
Bound = float | Tensor


def sums_of_sequences(x_BT: Tensor, branch_BT: Tensor | None) -> Tensor:
    """The sum of each sequence, [B, K]; 0 where a rollout has no such branch."""
    if branch_BT is None:
        return x_BT.sum(-1, keepdim=True)
    K = int(branch_BT.max()) + 1 if branch_BT.numel() else 1
    dtype = x_BT.dtype if x_BT.is_floating_point() else torch.long
    return x_BT.new_zeros(len(x_BT), K, dtype=dtype).scatter_add(1, branch_BT, x_BT.to(dtype))


def lengths_of_sequences(mask_BT: Tensor, branch_BT: Tensor | None) -> Tensor:
    """L: the counted tokens of each sequence, [B, K]."""
    return sums_of_sequences(mask_BT.bool(), branch_BT)


def means_of_sequences(x_BT: Tensor, mask_BT: Tensor, branch_BT: Tensor | None) -> Tensor:
    """sum_t x / L of each sequence, [B, K]; x is 0 outside the mask. 0 for a sequence without tokens."""
    return sums_of_sequences(x_BT, branch_BT) / lengths_of_sequences(mask_BT, branch_BT).clamp(min=1)


def at_tokens(x_BK: Tensor, mask_BT: Tensor, branch_BT: Tensor | None) -> Tensor:
    """Each token's value of its sequence, [B, T]."""
    return x_BK.expand(mask_BT.shape) if branch_BT is None else x_BK.gather(1, branch_BT)


class SampledTokens(NamedTuple):
    """The inputs of an objective: [B, T] each, in one dtype, and 0 outside the mask.

    logp_BT: the policy's log-probs, which alone have a gradient. old_BT: denominator of the ratio. A_BT: advantages.
    delta_BT: logp - old. mask_BT: bool. branch_BT: the branch of each token, from 0; None where a rollout is one
    sequence.
    """

    logp_BT: Tensor
    old_BT: Tensor
    delta_BT: Tensor
    A_BT: Tensor
    mask_BT: Tensor
    branch_BT: Tensor | None = None

    @classmethod
    @checked_shapes
    def of(
        cls,
        logp_BT: Tensor,
        old_logp_BT: Tensor,
        advantage_BT: Tensor,
        mask_BT: Tensor,
        branch_BT: Tensor | None = None,
    ) -> Self:
        """Values on padding, be they NaN, reach no loss or gradient. ValueError: shapes that differ."""
        dtype, m_BT = torch.promote_types(torch.result_type(logp_BT, old_logp_BT), torch.float32), mask_BT.bool()
        logp_BT, old_BT, A_BT = (
            torch.where(m_BT, x_BT.to(dtype), 0.0) for x_BT in (logp_BT, old_logp_BT.detach(), advantage_BT.detach())
        )
        return cls(logp_BT, old_BT, logp_BT - old_BT, A_BT, m_BT, branch_BT)


class TokenLoss(NamedTuple):
    """All [B, T], and without meaning outside the mask.

    l_BT: the loss of each token.
    below_BT, above_BT: bool; beyond the objective's lower or upper bound, for any advantage.
    cut_low_BT, cut_high_BT: bool; those of them that the bound changes.
    dual_BT: bool; cut by the dual clip.
    """

    l_BT: Tensor
    below_BT: Tensor
    above_BT: Tensor
    cut_low_BT: Tensor
    cut_high_BT: Tensor
    dual_BT: Tensor


def clip_loss(
    tokens: SampledTokens,
    low: float,
    high: float,
    *,
    importance_sampling: str = "seq",
    dual_clip: float | None = None,
    reference_length: float | None = None,
) -> TokenLoss:
    """l = -min(ratio A, clip(ratio, 1 - low, 1 + high) A), and for A < 0 at most -dual_clip A.

    Gradient through the ratio; none where the clip cuts: the ratio is below and A < 0, or above and A > 0. With
    `reference_length`, for the ratio of a sequence, the two sides are those of `clip_sides`.
    Source: arXiv 2507.18071, eq. 5 and 13. ValueError: bounds, an unknown ratio, a reference length or branches under
    `token`.
    """
    if dual_clip is not None and not 1 < dual_clip < math.inf:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1, or None for no dual clip")
    ratio_BT, A_BT = ratios(tokens, importance_sampling), tokens.A_BT
    bounds: tuple[Bound, Bound] = _checked(low, high)
    if reference_length is not None:
        if importance_sampling == "token" or not 0 < reference_length < math.inf:
            raise ValueError(
                f"reference_length is {reference_length} and importance_sampling {importance_sampling!r}; it must be "
                "finite and above 0, and widens the clip of a sequence's ratio"
            )
        bounds = _sides_at_tokens(tokens, low, high, reference_length)
    clipped_BT, below_BT, above_BT = _bounded(ratio_BT, *bounds)
    l_BT = -torch.minimum(ratio_BT * A_BT, clipped_BT * A_BT)
    if dual_clip is not None:
        l_BT = torch.where(A_BT < 0, torch.minimum(l_BT, -dual_clip * A_BT), l_BT)
    dual_BT = (A_BT < 0) & (ratio_BT > (math.inf if dual_clip is None else dual_clip))
    return TokenLoss(l_BT, below_BT, above_BT, below_BT & (A_BT < 0), above_BT & (A_BT > 0), dual_BT)


def cispo_loss(tokens: SampledTokens, low: float, high: float, *, importance_sampling: str = "seq") -> TokenLoss:
    """CISPO: l = -sg[clip(ratio, 1 - low, 1 + high)] A logp, sg stopping the gradient.

    Gradient through the log-prob alone, at every token: the clip bounds a token's weight and never takes it out. seq
    and seq_token are the same.
    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. ValueError: as `clip_loss`.
    """
    ratio_BT = ratios(tokens, importance_sampling).detach()
    weight_BT, below_BT, above_BT = _bounded(ratio_BT, *_checked(low, high))
    l_BT = -weight_BT * tokens.A_BT * tokens.logp_BT
    return TokenLoss(l_BT, below_BT, above_BT, below_BT, above_BT, torch.zeros_like(tokens.mask_BT))


def dppo_loss(tokens: SampledTokens, low: float, high: float, *, divergence: str) -> TokenLoss:
    """DPPO: l = -ratio A, or 0 where a token has moved in its advantage's direction beyond a divergence.

    The ratio is that of the token. It is cut where A < 0, ratio < 1 and D > low, and where A > 0, ratio > 1 and
    D > high. D compares old and present policy by the sampled token against all others, see `binary_divergence`.
    Source: arXiv 2602.04879, eq. 11 to 14. ValueError: bounds, an unknown divergence, branches.
    """
    ratio_BT, A_BT = ratios(tokens, "token"), tokens.A_BT
    low, high = _checked(low, high)
    D_BT = binary_divergence(tokens.logp_BT, tokens.old_BT, divergence)
    below_BT, above_BT = (ratio_BT < 1) & (low < D_BT), (ratio_BT > 1) & (high < D_BT)
    cut_low_BT, cut_high_BT = below_BT & (A_BT < 0), above_BT & (A_BT > 0)
    l_BT = torch.where(cut_low_BT | cut_high_BT, 0.0, -ratio_BT * A_BT)
    return TokenLoss(l_BT, below_BT, above_BT, cut_low_BT, cut_high_BT, torch.zeros_like(tokens.mask_BT))


def ratios(tokens: SampledTokens, importance_sampling: str) -> Tensor:
    """The ratio of each token, [B, T], by one of IMPORTANCE_SAMPLINGS; its logarithm acts within +-60."""
    delta_BT, mask_BT, branch_BT = tokens.delta_BT, tokens.mask_BT, tokens.branch_BT
    if importance_sampling == "token":
        if branch_BT is not None:
            raise ValueError("branch_BT is set and importance_sampling 'token', whose ratios are of tokens")
        log_ratio_BT = delta_BT
    elif importance_sampling in IMPORTANCE_SAMPLINGS:
        log_ratio_BT = at_tokens(means_of_sequences(delta_BT, mask_BT, branch_BT), mask_BT, branch_BT)
        if importance_sampling == "seq_token":
            log_ratio_BT = log_ratio_BT.detach() + (delta_BT - delta_BT.detach())
    else:
        raise ValueError(
            f"importance_sampling is {importance_sampling!r}; it must be one of {', '.join(IMPORTANCE_SAMPLINGS)}"
        )
    return torch.exp(log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def binary_divergence(logp_BT: Tensor, old_logp_BT: Tensor, kind: str) -> Tensor:
    """Divergence from old to present policy of "this token or another one"; p = exp(logp), q = exp(old).

        dppo_tv  |p - q|
        dppo_kl  q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    Both [B, T], at most 0 but for rounding; returns [B, T] in float64, without gradient. ValueError: unknown kind.
    """
    new_BT, old_BT = (x.detach().double().clamp(max=-_LEAST_SURPRISE) for x in (logp_BT, old_logp_BT))
    q_BT = old_BT.exp()
    if kind == "dppo_tv":
        return (new_BT.exp() - q_BT).abs()
    if kind == "dppo_kl":
        new_rest_BT, old_rest_BT = (torch.log1p(-x.exp()) for x in (new_BT, old_BT))
        return q_BT * (old_BT - new_BT) + (1 - q_BT) * (old_rest_BT - new_rest_BT)
    raise ValueError(f"kind is {kind!r}; it must be 'dppo_tv' or 'dppo_kl'")


def clip_sides(length_B: Tensor, low: float, high: float, reference_length: float | None) -> tuple[Tensor, Tensor]:
    """(low_i, high_i): the two sides of the clip for sequences of L_i = `length_B` tokens, float64, of its shape.

        side_i = side sqrt(reference_length / L_i), low_i at most 1; the sides themselves where it is None

    log s_i is a mean over L_i tokens. If these move independently, its spread falls with 1 / sqrt(L_i). Such sides then
    clip an equal share of short and long sequences. An empty sequence has those of one token.
    """
    scale_B = clip_scale(length_B, reference_length)
    return (low * scale_B).clamp(max=1), high * scale_B


def clip_scale(length_B: Tensor, reference_length: float | None) -> Tensor:
    """The factor of `clip_sides` for sequences of `length_B` tokens, float64, of its shape; 1 without a reference."""
    if reference_length is None:
        return torch.ones_like(length_B, dtype=torch.float64)
    return (reference_length / length_B.clamp(min=1).double()).sqrt()


def _sides_at_tokens(tokens: SampledTokens, low: float, high: float, reference_length: float) -> tuple[Bound, Bound]:
    sides_BK = clip_sides(lengths_of_sequences(tokens.mask_BT, tokens.branch_BT), low, high, reference_length)
    low_BT, high_BT = (at_tokens(it.to(tokens.A_BT.dtype), tokens.mask_BT, tokens.branch_BT) for it in sides_BK)
    return low_BT, high_BT


def _bounded(ratio_BT: Tensor, low: Bound, high: Bound) -> tuple[Tensor, Tensor, Tensor]:
    """The ratio within the bounds, and whether it is below or above them."""
    return ratio_BT.clamp(min=1 - low).clamp(max=1 + high), ratio_BT < 1 - low, ratio_BT > 1 + high


def _checked(low: float, high: float) -> tuple[float, float]:
    if not 0 <= low <= 1:
        raise ValueError(f"pg_clip_low is {low}; it must be in [0, 1]")
    if not 0 <= high < math.inf:
        raise ValueError(f"pg_clip_high is {high}; it must be finite and at least 0")
    return low, high
