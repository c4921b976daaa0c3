"""KL divergence per token between the policy and a reference, by one-sample estimators.

Not the penalty itself: coefficients and sums belong to the caller (loss.aggregate, advantage.token_advantages).
"""

import torch
from torch import Tensor

from gspo_core.shapes import checked_shapes

K3_LIMIT = 10.0
# exp(20) is far beyond K3_LIMIT, so this changes no value; it keeps inf out of exp, whose gradient would be NaN.
EXPONENT_LIMIT = 20.0


@checked_shapes
def kl_divergence(logp_BT: Tensor, ref_logp_BT: Tensor, kind: str = "k3") -> Tensor:
    """KL(policy || reference) at each token sampled from the policy, d = ref - logp.

        k1 = -d                        unbiased, either sign
        k2 = d^2 / 2                   biased, never negative
        k3 = exp(d) - d - 1            unbiased, never negative; clamped to +-10, no gradient beyond

    In the mean over the policy's own tokens, the gradient of k2 in logp is that of the KL: its slope is k1.
    Source: J. Schulman, "Approximating KL Divergence" (2020).
    Both inputs [B, T]; returns [B, T] in float32 (float64 if an input is). Differentiable in both.
    ValueError: shapes that differ, unknown kind.
    """
    dtype = torch.promote_types(torch.result_type(logp_BT, ref_logp_BT), torch.float32)
    d_BT = ref_logp_BT.to(dtype) - logp_BT.to(dtype)
    if kind == "k1":
        return -d_BT
    if kind == "k2":
        return d_BT.square() / 2
    if kind == "k3":
        k3_BT = torch.exp(d_BT.clamp(max=EXPONENT_LIMIT)) - d_BT - 1
        return k3_BT.clamp(-K3_LIMIT, K3_LIMIT)
    raise ValueError(f"kind is {kind!r}; it must be 'k1', 'k2' or 'k3'")
