"""The attention of short rows against torch's own: values and gradients."""

from __future__ import annotations

import pytest
import torch

from services.learner.attention import short_causal_attention


@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_values_and_gradients_are_those_of_torch(num_heads: int, num_key_heads: int, scaling: float | None) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, heads, 7, 8, dtype=torch.float64) for heads in (num_heads, num_key_heads, num_key_heads)]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    found = short_causal_attention(*ours, scaling)
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True, scale=scaling, enable_gqa=True)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_first_position_sees_itself_alone() -> None:
    value = torch.tensor([[[[1.0, 2.0], [30.0, 40.0]]]])
    found = short_causal_attention(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), value)
    assert found.tolist() == [[[[1.0, 2.0], [15.5, 21.0]]]]
