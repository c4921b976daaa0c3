"""The attention of short rows against torch's own: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo.learner.model import attention
from gspo.learner.model.attention import (
    attend_to,
    attention_name,
    attention_of_line,
    has_variable_length_attention,
    short_causal_attention,
)
from gspo.learner.model.batch import PackedRollouts
from gspo.learner.model.network import hidden_states
from tests.support.typed.gradients import backward


@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_values_and_gradients_are_those_of_torch(num_heads: int, num_key_heads: int, scaling: float | None) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, heads, 7, 8, dtype=torch.float64) for heads in (num_heads, num_key_heads, num_key_heads)]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    attended = short_causal_attention(ours[0], ours[1], ours[2], scaling)
    expected = torch.nn.functional.scaled_dot_product_attention(
        theirs[0], theirs[1], theirs[2], is_causal=True, scale=scaling, enable_gqa=True
    )
    torch.testing.assert_close(attended, expected)
    weight = torch.randn_like(expected)
    backward((attended * weight).sum())
    backward((expected * weight).sum())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_first_position_sees_itself_alone() -> None:
    value = torch.tensor([[[[1.0, 2.0], [30.0, 40.0]]]])
    attended = short_causal_attention(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), value)
    assert attended.tolist() == [[[[1.0, 2.0], [15.5, 21.0]]]]


def test_a_packed_line_is_laid_side_by_side_and_back() -> None:
    """Lengths 3, 3, 2, 1 in blocks of at most 6 places: two rows of 3, then rows of 2 and 1."""
    line = PackedRollouts.of([3, 3, 2, 1], 6)
    assert line.position_S.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 0]
    values_S = torch.arange(10.0, 19.0, dtype=torch.float64, requires_grad=True)
    first, second = (block.to_rows(values_S) for block in line.blocks)
    assert first.tolist() == [[10, 11, 12], [13, 14, 15]]
    assert second.tolist() == [[16, 17], [18, 18]]
    back_S = torch.cat([block.to_line(rows) for block, rows in zip(line.blocks, (first, second), strict=True)])
    assert back_S.tolist() == values_S.tolist()
    backward((back_S * torch.arange(1.0, 10.0)).sum())
    assert values_S.grad is not None and values_S.grad.tolist() == list(range(1, 10))


def test_packed_rollouts_keep_a_layer_s_sliding_window() -> None:
    """Layers that look back 4 positions, beside one that sees all; transformers' own masks give the expected result."""
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        initializer_range=0.5,
    )
    config._attn_implementation = attention_name()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    rollouts = [torch.randint(0, 50, (length,)) for length in (11, 9, 3)]
    with torch.no_grad():
        apart = [hidden_states(model, token_S[None], None)[0] for token_S in rollouts]
        line = PackedRollouts.of([11, 9, 3], 22)
        packed = hidden_states(model, torch.cat(rollouts)[None], line)[0]
        torch.testing.assert_close(packed, torch.cat(apart), rtol=1e-4, atol=1e-4)
        for layer in model.model.layers:
            layer.self_attn.sliding_window = None
        wide = hidden_states(model, torch.cat(rollouts)[None], line)[0]
        attend_to(None)
    # The window shows in positions that are further back than it, and in no others.
    assert torch.allclose(wide[:4], packed[:4], atol=1e-4) and not torch.allclose(wide[10], packed[10], atol=1e-2)


def test_a_line_tells_torch_its_bounds() -> None:
    line = PackedRollouts.of([3, 3, 2, 1], 6)
    assert (line.bound_N.tolist(), line.bound_N.dtype, line.longest) == ([0, 3, 6, 8, 9], torch.int32, 3)


@pytest.mark.parametrize("window", [None, 2])
def test_the_call_of_variable_length_attention_is_torch_s(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """On tensors without numbers: a CPU has the function, and no kernel for it."""
    line = PackedRollouts.of([3, 2], 5).to(torch.device("meta"))
    options: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    tensors = [torch.empty(5, heads, 16, **options) for heads in (4, 2, 2)]
    assert not has_variable_length_attention(torch.empty(5, 4, 16), torch.empty(5, 2, 16))
    monkeypatch.setattr(attention, "has_variable_length_attention", lambda *_: True)
    calls: list[tuple[int, int]] = []

    def called(*arguments: Any, **options: Any) -> Any:
        calls.append(options["window_size"])
        return varlen_attn(*arguments, **options)

    monkeypatch.setattr(attention, "varlen_attn", called)
    attended = attention_of_line(torch.nn.Module(), tensors, line, 0.0, None, sliding_window=window)
    backward(attended.sum())
    assert attended.shape == (5, 4, 16)
    assert all(tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in tensors)
    # A position itself is in the window: so many less one are behind it. Torch's word for no limit is -1.
    assert calls == [(-1, 0) if window is None else (1, 0)]


def test_a_long_rollout_among_short_ones_is_a_block_of_its_own() -> None:
    """Side by side in one block, 100 short rows would be padded to the long one's length."""
    line = PackedRollouts.of([1000, *[10] * 100], 1000)
    assert [(block.num_rows, block.width) for block in line.blocks] == [(1, 1000), (100, 10)]
