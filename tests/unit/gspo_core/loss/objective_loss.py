"""Every objective of gspo_core by its name, aggregated, as `policy_loss` is for the clip alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gspo_core.figures import policy_stats
from gspo_core.loss import PolicyLoss, aggregate_loss
from gspo_core.token_losses import SampledTokens, cispo_loss, clip_loss, dppo_loss

OBJECTIVES = ("clip", "cispo", "dppo_tv", "dppo_kl")
_SIZES = ("loss_agg_mode", "num_sequences", "num_tokens", "max_response_length")


def objective_loss(
    logp_BT: Tensor,
    old_BT: Tensor,
    A_BT: Tensor,
    mask_BT: Tensor,
    *,
    objective: str = "clip",
    low: float = 3e-4,
    high: float = 4e-4,
    branch_BT: Tensor | None = None,
    **options: Any,
) -> PolicyLoss:
    """Loss and stats; the options are those of the objective's own function and of the aggregation."""
    tokens = SampledTokens.of(logp_BT, old_BT, A_BT, mask_BT, branch_BT)
    sizes = {name: options.pop(name) for name in _SIZES if name in options}
    if objective.startswith("dppo"):
        of_tokens = dppo_loss(tokens, low, high, divergence=objective, **options)
    else:
        of_tokens = (cispo_loss if objective == "cispo" else clip_loss)(tokens, low, high, **options)
    return PolicyLoss(aggregate_loss(of_tokens.l_BT, mask_BT, **sizes), policy_stats(tokens, of_tokens))
