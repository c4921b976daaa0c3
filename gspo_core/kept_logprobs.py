"""Log-probs of target tokens among those that top-k, top-p and min-p kept, straight from hidden states.

logprobs.py has those of the whole distribution.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo_core.logprobs import InputGradients, Products, check_inputs

# In the place of an id where a row has fewer tokens than the widest.
NO_TOKEN = -1


def kept_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    kept_NK: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target token, and entropy of its distribution, over the kept tokens K_n of its row alone.

        logp = z_y - log sum_{v in K} exp(z_v)          entropy = -sum_{v in K} p_v log p_v,  p = softmax of z in K

    z = hidden weight^T / temperature, as in `token_logprobs`, which says the same of dtypes, memory and gradients.
    The set is a constant: there is no gradient through its choice, and none of a token outside.
    `kept_NK` has the ids of each row's set, in any order and none twice, filled up with NO_TOKEN.
    Returns (logp_N, entropy_N).
    ValueError: as `token_logprobs`, a target outside its set, an id outside the vocabulary.
    """
    check_inputs(hidden_ND, weight_VD, target_N, temperature, chunk_size)
    if kept_NK.shape[:1] != target_N.shape or kept_NK.dim() != 2:
        raise ValueError(f"kept has shape {tuple(kept_NK.shape)}, target {tuple(target_N.shape)}; it must be [N, K]")
    if kept_NK.numel() and not bool(((kept_NK >= NO_TOKEN) & (kept_NK < len(weight_VD))).all()):
        raise ValueError(f"kept holds ids outside the vocabulary, which has 0 to {len(weight_VD) - 1}")
    if not bool((kept_NK == target_N[:, None]).any(-1).all()):
        raise ValueError("a target is not among the tokens that were kept for it")
    logp_N, entropy_N = _KeptLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, target_N.long(), kept_NK.long(), temperature, chunk_size
    )
    return logp_N, entropy_N


class _KeptLogprobs(torch.autograd.Function):
    """The gradient of logprobs.py's class, of the logits in the set: dz_v = g [v = y] - p_v (g + e (log p_v + H))."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        target_N: Tensor,
        kept_NK: Tensor,
        temperature: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        products = Products(hidden_ND, weight_VD, temperature)
        logp_N = hidden_ND.new_empty(len(hidden_ND), dtype=products.dtype)
        entropy_N = torch.empty_like(logp_N)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows, _, z_RV in products.chunks(hidden_ND, chunk_size):
                logp_RK, p_RK, is_target_RK = _in_sets(z_RV, target_N[rows], kept_NK[rows])
                logp_N[rows] = torch.where(is_target_RK, logp_RK, 0.0).sum(-1)
                entropy_N[rows] = -(p_RK * logp_RK).sum(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, kept_NK, entropy_N)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_N: Tensor | None, e_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, kept_NK, entropy_N = ctx.saved_tensors
        products = Products(hidden_ND, weight_VD, ctx.temperature)
        gradients = InputGradients(products, hidden_ND, weight_VD, ctx.needs_input_grad)
        g_N = torch.zeros_like(entropy_N) if g_N is None else g_N
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows, h_RD, z_RV in products.chunks(hidden_ND, ctx.chunk_size):
                logp_RK, p_RK, is_target_RK = _in_sets(z_RV, target_N[rows], kept_NK[rows])
                g_R1 = g_N[rows, None]
                weight_RK = g_R1 if e_N is None else g_R1 + e_N[rows, None] * (logp_RK + entropy_N[rows, None])
                dz_RK = torch.where(is_target_RK, g_R1, 0.0) - p_RK * weight_RK
                dz_RV = z_RV.zero_().scatter_add_(1, kept_NK[rows].clamp(min=0), dz_RK)
                gradients.add(rows, h_RD, products.rounded(dz_RV))
        return gradients.hidden_ND, gradients.weight_VD, None, None, None, None


def _in_sets(z_RV: Tensor, target_R: Tensor, kept_RK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, probabilities, which is the target) of the kept tokens of some rows; 0 where a row has no token."""
    is_filling_RK = kept_RK == NO_TOKEN
    z_RK = z_RV.gather(1, kept_RK.clamp(min=0)).masked_fill_(is_filling_RK, -torch.inf)
    logp_RK = torch.log_softmax(z_RK, -1)
    return logp_RK.masked_fill(is_filling_RK, 0.0), logp_RK.exp(), kept_RK == target_R[:, None]
