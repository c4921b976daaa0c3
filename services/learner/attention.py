"""Attention by plain matrix products, for short rows on a CPU, where it beats torch's own.

torch's fused attention is made for long rows: at 150 positions on a CPU its backward pass takes five times as long
as two matrix products and a softmax (and most of a step). Long rows, masks and GPUs stay with torch's.
Neighbour: policy_model.py loads models with `attention_name()`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "gspo_short_rows"
# Beyond this the scores no longer fit the caches and torch's fused attention wins.
_LONGEST = 512


def attention_name() -> str:
    """The attention to load a model with on this machine."""
    if torch.cuda.is_available():
        return "sdpa"
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention. query [R, heads, S, head width], key and value [R, kv heads, S, head width]."""
    short = query.shape[2] == key.shape[2] <= _LONGEST
    if not short or attention_mask is not None or dropout or not getattr(module, "is_causal", True):
        fused: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return fused
    return short_causal_attention(query, key, value, scaling).transpose(1, 2), None


def short_causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
    """softmax(query key^T * scaling, no later position) value: [R, heads, S, head width] like query.

    The query heads that share a key head stand side by side, so that no key or value is copied.
    """
    R, num_heads, S, width = query.shape
    shared = num_heads // key.shape[1]
    scale = 1 / math.sqrt(width) if scaling is None else scaling
    later_SS = value.new_full((S, S), -math.inf).triu(1).repeat(shared, 1)
    # Under autocast the norms leave query and key in float32.
    q, k, v = (tensor.to(value.dtype).reshape(R * key.shape[1], -1, width) for tensor in (query, key, value))
    attended: Tensor = _CausalAttention.apply(q, k, v, later_SS, scale)  # type: ignore[no-untyped-call]
    return attended.view(R, num_heads, S, width)


class _CausalAttention(torch.autograd.Function):
    """With p the attention, o = p v and g the gradient that arrives for o:

    dv = p^T g,   dp = g v^T,   ds = p (dp - sum(p dp)),   dq = scale ds k,   dk = scale ds^T q

    Written out so that each matrix of scores is touched as few times as can be, in the dtype of the query: softmax
    sums in float32 inside, autocast would copy its input to float32 first.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)
            p = torch.softmax(scores, -1)
            ctx.save_for_backward(q, k, v, p)
            ctx.scale = scale
            return p @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            ds = torch._softmax_backward_data(g @ v.transpose(1, 2), p, -1, p.dtype).mul_(ctx.scale)
            return ds @ k, ds.transpose(1, 2) @ q, p.transpose(1, 2) @ g, None, None
