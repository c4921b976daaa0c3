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
    """softmax(query key^T * scaling, no later position) value, in float32 where it matters. [R, heads, S, width]."""
    R, num_heads, S, width = query.shape
    shared = num_heads // key.shape[1]
    # The query heads that share a key head stand side by side, so that no key or value is copied.
    q = query.reshape(R, key.shape[1], shared * S, width) * (scaling or 1 / math.sqrt(width))
    scores = q @ key.transpose(2, 3)
    later = torch.ones(S, S, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.view(R, num_heads, S, S).masked_fill(later, -math.inf)
    p = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return (p.view(R, key.shape[1], shared * S, S) @ value).view(R, num_heads, S, width)
