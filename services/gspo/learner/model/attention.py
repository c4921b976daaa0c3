"""The policy's attention: packed rollouts see themselves alone, and short rows are fast on a CPU.

Attention over a whole packed line would cost the square of its length. On a GPU in bfloat16, torch's variable-length
attention takes the bounds of its rollouts. Elsewhere its rollouts are laid side by side, those of similar length
together, and each is a row of its own.
torch's fused attention suits long rows. At 150 positions on a CPU its backward pass takes five times as long as two
matrix products and a softmax, and most of a step. So short rows there use those; long rows, masks and GPUs use torch's.
A model whose layers need more than this, such as attention sinks, keeps its own attention (`use_own_attention`).
"""

import math
from collections.abc import Sequence
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gspo.common.model.heads import heads_divide
from gspo.learner.model.batch import PackedBlock, PackedRollouts
from gspo.learner.ranks.sequence_ranks import SequenceRanks

NAME = "gspo"
OWN_ATTENTION = "eager"
# Arguments that a layer may pass: windows are supported, query and key contain positions, `is_causal` is the module's.
_SUPPORTED = {"sliding_window", "position_ids", "is_causal"}
# Beyond this the scores no longer fit the caches and torch's fused attention wins.
_LONGEST = 512
# Of torch's FlashAttention.
_WIDEST_HEAD, _FLASH_CAPABILITY = 256, 8
# Fewer heads of keys than of queries: torch 2.11 takes them as they come, a later one on demand.
_SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
# Of each of two rows, to compare two ways to attend.
_TRIAL_TOKENS = 16
_TOLERANCE = 1e-3


class _Current:
    """The model's current input.

    A global, because the backward pass attends again under gradient checkpointing, and not every model passes unknown
    arguments on.

    Attributes:
        line: Its packed line; None for separate rows.
        ranks: The ranks that share the line; None where this one has all of it.
        arguments: Names of the arguments that layers pass to the attention; collected while this is a set.
    """

    line: PackedRollouts | None = None
    ranks: SequenceRanks | None = None
    arguments: set[str] | None = None


def attend_to(line: PackedRollouts | None, ranks: SequenceRanks | None = None) -> None:
    """Set the packed line of the next forward and its backward; None for separate rows.

    Args:
        ranks: The ranks that share the line, if this one's layers see only its part.
    """
    _Current.line, _Current.ranks = line, ranks


def attention_name() -> str:
    """The attention to load a model with."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    return NAME


def stay_uncompiled() -> None:
    """Keep this module's attention out of layers that are compiled from now on."""
    # here: naming it imports torch's compiler, which takes a second
    AttentionInterface.register(NAME, torch.compiler.disable(_attention))  # type: ignore[no-untyped-call]


@torch.no_grad()
def use_own_attention(causal_lm: PreTrainedModel) -> str:
    """Give a model that was loaded with `attention_name()` its own attention back if this one differs.

    A trial on a few tokens compares the arguments of the layers, and the log-probs of both attentions.

    Returns:
        Why it has its own attention; empty if it keeps ours. If `has_own_attention` is False in spite of a reason, its
        code cannot change its attention and mask: load the model again with `OWN_ATTENTION`.
    """
    if has_own_attention(causal_lm):
        return "its code knows a few attentions by name alone"
    token_RS = _trial_tokens(causal_lm)
    ours, unknown = _ours(causal_lm, token_RS)
    causal_lm.set_attn_implementation(OWN_ATTENTION)
    if not has_own_attention(causal_lm):
        return "its code takes no other attention"
    own = causal_lm(input_ids=token_RS, use_cache=False).logits
    if unknown:
        return f"its layers pass {', '.join(sorted(unknown))}"
    if not torch.allclose(ours.log_softmax(-1), own.log_softmax(-1), rtol=_TOLERANCE, atol=_TOLERANCE):
        return "its log-probs differ"
    causal_lm.set_attn_implementation(NAME)
    return ""


def _trial_tokens(causal_lm: PreTrainedModel) -> Tensor:
    vocabulary, rows = causal_lm.config.get_text_config().vocab_size, 2
    token_N: Tensor = torch.arange(rows * _TRIAL_TOKENS, device=causal_lm.device) * 7 % vocabulary
    return token_N.view(rows, -1)


def _ours(causal_lm: PreTrainedModel, token_RS: Tensor) -> tuple[Tensor, set[str]]:
    """Logits by this attention, and the arguments of layers that it does not know."""
    attend_to(None)
    _Current.arguments = set()
    try:
        logits = causal_lm(input_ids=token_RS, use_cache=False).logits
        return logits, _Current.arguments - _SUPPORTED
    finally:
        _Current.arguments = None


@torch.no_grad()
def keeps_own_attention(causal_lm: PreTrainedModel) -> bool:
    """Whether `use_own_attention` would give a model its own attention back, as far as shapes alone show it."""
    try:
        return has_own_attention(causal_lm) or bool(_ours(causal_lm, _trial_tokens(causal_lm))[1])
    except (KeyError, TypeError):  # its code finds no attention of this name, or wants a mask of its own
        return True


def has_own_attention(causal_lm: PreTrainedModel) -> bool:
    """Whether the model uses its own attention instead of this module's."""
    return bool(causal_lm.config.get_text_config()._attn_implementation != NAME)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' own mask; none for a packed line, whose mask would be a square."""
    if _Current.line is not None:
        return None
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


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
    if _Current.arguments is not None:
        _Current.arguments |= {name for name, value in kwargs.items() if value is not None and value is not False}
    if _Current.line is None:
        return _attention_of_rows(module, query, key, value, attention_mask, dropout, scaling, kwargs), None
    # [positions, heads, head width]. Under autocast the norms leave query and key in float32.
    parts = [tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value)]
    ranks, line = _Current.ranks, _Current.line
    if ranks is None:
        return attention_of_line(module, parts, line, dropout, scaling, **kwargs)[None], None
    num_heads, num_key_heads = query.shape[1], key.shape[1]
    if not heads_divide(num_heads, num_key_heads, ranks.num_ranks):
        raise ValueError(f"{ranks.num_ranks} ranks cannot share out {num_heads} heads with {num_key_heads} key heads")
    of_heads = ranks.to_heads(parts, len(line.position_S))
    attended = attention_of_line(module, of_heads, line, dropout, scaling, **kwargs)
    return ranks.to_positions(attended)[None], None


def attention_of_line(
    layer: nn.Module,
    tensors: Sequence[Tensor],
    line: PackedRollouts,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> Tensor:
    """Causal attention of every rollout of a line for itself, in the fastest way that device and dtype have.

    Args:
        layer: Has `is_causal` False if a position sees later ones too.
        tensors: Query [S, heads, head width], key and value [S, kv heads, head width], of one dtype.
        kwargs: Only `sliding_window` of them counts: the positions that each sees, itself included.

    Returns:
        [S, heads, value's width].
    """
    query, _, value = tensors
    is_plain = not dropout and getattr(layer, "is_causal", True)
    if is_plain and has_variable_length_attention(query, value):
        return _variable_length_attention(tensors, line, scaling, kwargs.get("sliding_window"))
    return attention_side_by_side(layer, tensors, line, dropout, scaling, **kwargs)


def attention_side_by_side(
    layer: nn.Module,
    tensors: Sequence[Tensor],
    line: PackedRollouts,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> Tensor:
    """As `attention_of_line`, on any device and in any dtype: rollouts of similar length at a time, as rows."""
    query, key, _ = tensors
    heads = _Heads(query.shape[1] // key.shape[1], getattr(layer, "is_causal", True))
    attended = []
    for block in line.blocks:
        q_rows, k_rows, v_rows = (block.to_rows(tensor).transpose(1, 2) for tensor in tensors)
        mask = _window_mask(block, kwargs.get("sliding_window"), query.device)
        rows = _attention_of_rows(heads, q_rows, k_rows, v_rows, mask, dropout, scaling, kwargs)
        attended.append(block.to_line(rows))
    return torch.cat(attended)


class _Heads(NamedTuple):
    """The attributes of a layer that torch's attention reads, for the heads that are here."""

    num_key_value_groups: int
    is_causal: bool


def has_variable_length_attention(query: Tensor, value: Tensor) -> bool:
    """Whether torch's FlashAttention takes such a line: a GPU of compute capability 8 or more, half precision, heads
    of one width, a multiple of 8 up to 256.

    Args:
        query, value: [S, heads, head width].
    """
    if not (query.is_cuda and torch.backends.cuda.is_flash_attention_available()):
        return False
    is_half = value.dtype in (torch.bfloat16, torch.float16)
    fits = query.shape[-1] == value.shape[-1] <= _WIDEST_HEAD and not value.shape[-1] % 8
    return is_half and fits and torch.cuda.get_device_capability(query.device)[0] >= _FLASH_CAPABILITY


def _variable_length_attention(
    tensors: Sequence[Tensor], line: PackedRollouts, scaling: float | None, window: int | None
) -> Tensor:
    query, key, value = tensors
    attended = varlen_attn(
        query,
        key,
        value,
        line.bound_N,
        line.bound_N,
        line.longest,
        line.longest,
        scale=scaling,
        # Positions back and ahead, beside a position itself.
        window_size=(-1 if window is None else window - 1, 0),
        **_SHARED_KEYS,
    )
    return cast(Tensor, attended)


def _attention_of_rows(
    module: nn.Module | _Heads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """[R, S, heads, head width]."""
    short = query.device.type == "cpu" and query.shape[2] == key.shape[2] <= _LONGEST
    if not short or mask is not None or dropout or not getattr(module, "is_causal", True):
        fused: Tensor = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )[0]
        return fused
    return short_causal_attention(query, key, value, scaling).transpose(1, 2).contiguous()


def _window_mask(block: PackedBlock, window: int | None, device: torch.device) -> Tensor | None:
    """Bool [1, 1, S, S] if rows are longer than a layer's sliding window; else None."""
    if window is None or block.width <= window:
        return None
    place_S = torch.arange(block.width, device=device)
    back_SS = place_S[:, None] - place_S
    return ((back_SS >= 0) & (back_SS < window))[None, None]


def short_causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
    """softmax(query key^T * scaling, no later position) value: [R, heads, S, value's width].

    The query heads that share a key head are adjacent, so that no key or value is copied.
    """
    R, num_heads, S, width = query.shape
    shared = num_heads // key.shape[1]
    scale = 1 / math.sqrt(width) if scaling is None else scaling
    later_SS = value.new_full((S, S), -math.inf).triu(1).repeat(shared, 1)
    # Under autocast the norms leave query and key in float32.
    q, k, v = (t.to(value.dtype).reshape(R * key.shape[1], -1, t.shape[-1]) for t in (query, key, value))
    attended: Tensor = _CausalAttention.apply(q, k, v, later_SS, scale)  # type: ignore[no-untyped-call]
    return attended.view(R, num_heads, S, value.shape[-1])


class _CausalAttention(torch.autograd.Function):
    """With p the attention, o = p v and g the gradient that arrives for o:

    dv = p^T g,   dp = g v^T,   ds = p (dp - sum(p dp)),   dq = scale ds k,   dk = scale ds^T q

    This form touches each matrix of scores as seldom as possible, in the dtype of the query. softmax sums in float32
    inside; autocast would first copy its input to float32.
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
