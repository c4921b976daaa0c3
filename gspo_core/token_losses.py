"""The loss of each token by one of four objectives, and what the bounds of that objective cut off.

Not here: ratios, and sums over tokens and sequences; loss.py has both.
"""

from typing import NamedTuple

import torch
from torch import Tensor

OBJECTIVES = ("clip", "cispo", "dppo_tv", "dppo_kl")
# exp(-this) is 1 in float64, so that the rest of the distribution never has probability 0.
_LEAST_SURPRISE = 1e-12
# One for all tokens, or one for each: [B, T].
Bound = float | Tensor


class TokenLoss(NamedTuple):
    """All [B, T], and without meaning outside the mask.

    l_BT: the loss of each token.
    below_BT, above_BT: bool; beyond the objective's lower or upper bound, for any advantage.
    cut_low_BT, cut_high_BT: bool; those of them that the bound changes.
    """

    l_BT: Tensor
    below_BT: Tensor
    above_BT: Tensor
    cut_low_BT: Tensor
    cut_high_BT: Tensor


def token_losses(
    objective: str,
    ratio_BT: Tensor,
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    A_BT: Tensor,
    *,
    bounds: tuple[Bound, Bound],
    dual_clip: float | None = None,
) -> TokenLoss:
    """The losses by one of OBJECTIVES; `bounds` are (low, high), `dual_clip` is for clip alone. Tensors [B, T].

    ValueError: an unknown objective, dual_clip with another one than clip.
    """
    if objective != "clip" and dual_clip is not None:
        raise ValueError(f"dual_clip is {dual_clip} and objective {objective!r}; only 'clip' has a dual clip")
    if objective == "clip":
        return clipped_ratio(ratio_BT, A_BT, *bounds, dual_clip)
    if objective == "cispo":
        return clipped_weight(ratio_BT, logp_BT, A_BT, *bounds)
    if objective in ("dppo_tv", "dppo_kl"):
        return masked_divergence(ratio_BT, logp_BT, old_logp_BT, A_BT, *bounds, objective)
    raise ValueError(f"objective is {objective!r}; it must be one of {', '.join(OBJECTIVES)}")


def clipped_ratio(ratio_BT: Tensor, A_BT: Tensor, low: Bound, high: Bound, dual_clip: float | None) -> TokenLoss:
    """l = -min(ratio A, clip(ratio, 1 - low, 1 + high) A), and for A < 0 at most -dual_clip A.

    Gradient through `ratio_BT`; none where the clip cuts: the ratio is below and A < 0, or above and A > 0.
    Source: arXiv 2507.18071, eq. 5.
    """
    clipped_BT = _between(ratio_BT, low, high)
    l_BT = -torch.minimum(ratio_BT * A_BT, clipped_BT * A_BT)
    if dual_clip is not None:
        l_BT = torch.where(A_BT < 0, torch.minimum(l_BT, -dual_clip * A_BT), l_BT)
    below_BT, above_BT = _outside(ratio_BT, low, high)
    return TokenLoss(l_BT, below_BT, above_BT, below_BT & (A_BT < 0), above_BT & (A_BT > 0))


def clipped_weight(ratio_BT: Tensor, logp_BT: Tensor, A_BT: Tensor, low: Bound, high: Bound) -> TokenLoss:
    """CISPO: l = -sg[clip(ratio, 1 - low, 1 + high)] A logp, sg stopping the gradient.

    Gradient through `logp_BT` alone, at every token: the clip bounds a token's weight and never takes it out.
    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    weight_BT = _between(ratio_BT.detach(), low, high)
    below_BT, above_BT = _outside(ratio_BT, low, high)
    return TokenLoss(-weight_BT * A_BT * logp_BT, below_BT, above_BT, below_BT, above_BT)


def masked_divergence(
    ratio_BT: Tensor, logp_BT: Tensor, old_logp_BT: Tensor, A_BT: Tensor, low: Bound, high: Bound, kind: str
) -> TokenLoss:
    """DPPO: l = -ratio A, or 0 where a token has moved in its advantage's direction beyond a divergence.

    A token is cut where A < 0, ratio < 1 and D > low, and where A > 0, ratio > 1 and D > high. D compares old and
    present policy by the sampled token against all others, see `binary_divergence`.
    Source: arXiv 2602.04879, eq. 11 to 14.
    """
    D_BT = binary_divergence(logp_BT.detach(), old_logp_BT, kind)
    below_BT = (ratio_BT < 1) & (low < D_BT)
    above_BT = (ratio_BT > 1) & (high < D_BT)
    cut_low_BT, cut_high_BT = below_BT & (A_BT < 0), above_BT & (A_BT > 0)
    l_BT = torch.where(cut_low_BT | cut_high_BT, 0.0, -ratio_BT * A_BT)
    return TokenLoss(l_BT, below_BT, above_BT, cut_low_BT, cut_high_BT)


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


def _between(ratio_BT: Tensor, low: Bound, high: Bound) -> Tensor:
    return ratio_BT.clamp(min=1 - low).clamp(max=1 + high)


def _outside(ratio_BT: Tensor, low: Bound, high: Bound) -> tuple[Tensor, Tensor]:
    return ratio_BT < 1 - low, ratio_BT > 1 + high
