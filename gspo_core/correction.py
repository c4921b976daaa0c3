"""Weights for rollouts whose recomputed log-probs differ from those of the inference engine.

Not the clip: that bounds how far the policy moves in a step; this bounds what sampling under old weights costs.
"""

import math

import torch
from torch import Tensor

from gspo_core.shapes import checked_shapes
from gspo_core.stats import Stats, mean_stats, moment_stats
from gspo_core.token_losses import LOG_RATIO_LIMIT, means_of_sequences

BEHAVIOR_LEVELS = ("token", "geometric", "product")


def behavior_weights(
    old_logp_BT: Tensor,
    behavior_logp_BT: Tensor,
    mask_BT: Tensor,
    *,
    behavior_correction: str,
    behavior_level: str = "geometric",
    bounds: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """w = old policy over behavior policy, within `bounds` = (lowest, highest), for every token.

        token      w_it = exp(old_it - behavior_it)
        geometric  w_it = exp(sum_t m_it (old_it - behavior_it) / L_i)
        product    w_it = exp(sum_t m_it (old_it - behavior_it))

    The last two are one weight for all tokens of a sequence; the product is its exact weight.

        truncate  w clamped to the bounds, every token kept
        mask      w as it is, only tokens (with the other levels: whole sequences) inside the bounds kept

    verl calls the last two levels geometric and sequence (docs/algo/rollout_corr.md); TRL's modes `sequence_*` are the
    product.

    All tensors [B, T]; returns (weight_BT, keep_BT), detached: the weight multiplies the token's advantage. If keep
    is false, the weight is 0, and the caller takes the token out of the mask. It then leaves L_i, and with its last
    token a sequence leaves N. Outside the mask the weight is that of its sequence, or 1.
    ValueError: shapes, an unknown kind or level, bounds that are not 0 <= lowest <= 1 <= highest.
    """
    w_BT = _weights(old_logp_BT, behavior_logp_BT, mask_BT, behavior_level)
    if behavior_correction not in ("truncate", "mask"):
        raise ValueError(f"behavior_correction is {behavior_correction!r}; it must be 'truncate' or 'mask'")
    lowest, highest = _checked(bounds)
    if behavior_correction == "truncate":
        return (w_BT.clamp(lowest, highest), torch.ones_like(w_BT, dtype=torch.bool))
    keep_BT = (w_BT >= lowest) & (w_BT <= highest)
    return (torch.where(keep_BT, w_BT, 0.0), keep_BT)


def behavior_stats(
    old_logp_BT: Tensor,
    behavior_logp_BT: Tensor,
    mask_BT: Tensor,
    *,
    behavior_level: str = "geometric",
    bounds: tuple[float, float],
) -> Stats:
    """Figures of the correction: `behavior_weight` (mean, std, max over tokens, before it is bounded), its logarithm
    `behavior_log_weight`, and `behavior_outside`, the share of tokens whose weight is outside `bounds`.

    Inputs as for `behavior_weights`. A few large weights hold the mean of a product near 1, however small the others
    are. The mean of the logarithms falls with all of them.
    """
    lowest, highest = _checked(bounds)
    w_BT = _weights(old_logp_BT, behavior_logp_BT, mask_BT, behavior_level)
    outside_BT = (w_BT < lowest) | (w_BT > highest)
    return {
        **moment_stats("behavior_weight", w_BT, mask_BT),
        **mean_stats("behavior_log_weight", w_BT.log(), mask_BT),
        **mean_stats("behavior_outside", outside_BT, mask_BT),
    }


@checked_shapes
def _weights(old_logp_BT: Tensor, behavior_logp_BT: Tensor, mask_BT: Tensor, behavior_level: str) -> Tensor:
    dtype = torch.promote_types(torch.result_type(old_logp_BT, behavior_logp_BT), torch.float32)
    delta_BT = old_logp_BT.detach().to(dtype) - behavior_logp_BT.detach().to(dtype)
    log_w_BT = torch.where(mask_BT.bool(), delta_BT, 0.0)
    if behavior_level == "geometric":
        log_w_BT = means_of_sequences(log_w_BT, mask_BT, None).expand_as(log_w_BT)
    elif behavior_level == "product":
        log_w_BT = log_w_BT.sum(-1, keepdim=True).expand_as(log_w_BT)
    elif behavior_level != "token":
        raise ValueError(f"behavior_level is {behavior_level!r}; it must be one of {', '.join(BEHAVIOR_LEVELS)}")
    return torch.exp(log_w_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _checked(bounds: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= bounds[0] <= 1 <= bounds[1] < math.inf:
        raise ValueError(f"bounds is {bounds}; it must be (lowest, highest) with 0 <= lowest <= 1 <= highest")
    return bounds
