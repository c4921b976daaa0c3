"""gspo_core's log-probs and entropies, with all that surrounds the products compiled to a few kernels.

Logits are read twice in the forward pass, and read and written once in the backward pass. The rounding differs from
gspo_core/logprobs.py, the reference.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo_core.logprobs import InputGradients, Products, check_inputs


def fused_token_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, temperature: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """As `gspo_core.logprobs.token_logprobs`, of rows: (log-probs, entropies), each [N].

    Memory holds chunk_size x V logits, and under bfloat16 their rounded gradients.
    """
    check_inputs(hidden_ND, weight_VD, target_N, temperature, chunk_size)
    logp_N, entropy_N = _FusedTokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, target_N, temperature, chunk_size
    )
    return logp_N, entropy_N


class _FusedTokenLogprobs(torch.autograd.Function):
    """As gspo_core has it. The forward pass keeps L = log sum_v exp(z_v), so the backward pass needs no softmax:

    p_v = exp(z_v - L),   dz_v = g [v = y] - p_v (g + e (z_v - L + H))
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        products = Products(hidden_ND, weight_VD, temperature)
        logp_N = hidden_ND.new_empty(len(hidden_ND), dtype=products.dtype)
        entropy_N, sum_N = torch.empty_like(logp_N), torch.empty_like(logp_N)
        figures = _compiled(_figures)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows, _, z_RV in products.chunks(hidden_ND, chunk_size):
                logp_N[rows], entropy_N[rows], sum_N[rows] = figures(z_RV, target_N[rows])
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, entropy_N, sum_N)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_N: Tensor | None, e_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, entropy_N, sum_N = ctx.saved_tensors
        products = Products(hidden_ND, weight_VD, ctx.temperature)
        gradients = InputGradients(products, hidden_ND, weight_VD, ctx.needs_input_grad)
        g_N = torch.zeros_like(entropy_N) if g_N is None else g_N
        gradient = _compiled(_gradient)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows, h_RD, z_RV in products.chunks(hidden_ND, ctx.chunk_size):
                e_R = None if e_N is None else e_N[rows]
                of_rows = (target_N[rows], sum_N[rows], entropy_N[rows], g_N[rows], e_R)
                gradients.add(rows, h_RD, gradient(z_RV, *of_rows, products.precision).to(products.stored))
        return gradients.hidden_ND, gradients.weight_VD, None, None, None


def _figures(z_RV: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of the target, entropy, logarithm of the sum of exp) of each row of logits."""
    sum_R = torch.logsumexp(z_RV, -1)
    logp_RV = z_RV - sum_R[:, None]
    entropy_R = -(torch.exp(logp_RV) * logp_RV).sum(-1)
    return z_RV.gather(1, target_R[:, None])[:, 0] - sum_R, entropy_R, sum_R


def _gradient(
    z_RV: Tensor,
    target_R: Tensor,
    sum_R: Tensor,
    entropy_R: Tensor,
    g_R: Tensor,
    e_R: Tensor | None,
    precision: torch.dtype,
) -> Tensor:
    """The gradient of the logits, rounded; the class above says which."""
    logp_RV = z_RV - sum_R[:, None]
    weight_RV = g_R[:, None] if e_R is None else g_R[:, None] + e_R[:, None] * (logp_RV + entropy_R[:, None])
    is_target_RV = torch.arange(z_RV.shape[1], device=z_RV.device) == target_R[:, None]
    return (torch.where(is_target_RV, g_R[:, None], 0.0) - torch.exp(logp_RV) * weight_RV).to(precision)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for all numbers of rows; a vocabulary has one size."""
    return torch.compile(function, dynamic=True)
