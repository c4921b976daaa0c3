"""Weights for rollouts whose recomputed log-probs differ from what the inference engine reported.

Not the clip: that bounds how far the policy moves in a step; this bounds what sampling under old weights costs.
Neighbours: the learner, under `old_logprobs: recompute`, multiplies advantages and thins the mask by the result.
"""

import math

import torch
from torch import Tensor

from gspo_core.loss import LOG_RATIO_LIMIT, sequence_log_ratio


def behavior_weights(
    old_logp_BT: Tensor,
    behavior_logp_BT: Tensor,
    mask_BT: Tensor,
    *,
    behavior_correction: str,
    bounds: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """w_i = exp(sum_t m_it (old_it - behavior_it) / L_i), within `bounds` = (lowest, highest).

        none      w = 1 for every sequence
        truncate  w clamped to the bounds, every sequence kept
        mask      w as it is, only sequences inside the bounds kept

    All tensors [B, T]; returns (weight_B, keep_B), detached: the weight multiplies the sequence's advantage, and
    where keep is false the weight is 0 and the caller takes the sequence out of the mask, so that it leaves N.
    ValueError: shapes, an unknown kind, bounds missing, beside "none", or not 0 <= lowest <= 1 <= highest.
    """
    log_w_B = sequence_log_ratio(old_logp_BT.detach(), behavior_logp_BT.detach(), mask_BT)
    w_B = torch.exp(log_w_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    all_B = torch.ones_like(w_B, dtype=torch.bool)
    if behavior_correction == "none":
        if bounds is not None:
            raise ValueError(f"bounds is {bounds} and behavior_correction 'none'; leave the bounds out")
        return (torch.ones_like(w_B), all_B)
    if behavior_correction not in ("truncate", "mask"):
        raise ValueError(f"behavior_correction is {behavior_correction!r}; it must be 'none', 'truncate' or 'mask'")
    if bounds is None or not 0 <= bounds[0] <= 1 <= bounds[1] < math.inf:
        raise ValueError(f"bounds is {bounds}; it must be (lowest, highest) with 0 <= lowest <= 1 <= highest")
    lowest, highest = bounds
    if behavior_correction == "truncate":
        return (w_B.clamp(lowest, highest), all_B)
    keep_B = (w_B >= lowest) & (w_B <= highest)
    return (torch.where(keep_B, w_B, 0.0), keep_B)
