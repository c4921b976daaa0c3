"""Behavior correction: the weight of a sequence, capped or masked."""

import math

import pytest
import torch

from gspo_core.correction import behavior_weights

OLD = torch.tensor([[0.4, 0.0, 9.0], [-3.0, -1.0, -2.0], [5.0, 5.0, 5.0]])  # row means 0.2, -2, none
BEHAVIOR = torch.zeros(3, 3)
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize(
    ("kind", "bounds", "weights", "kept"),
    [
        ("none", None, [1, 1, 1], [True, True, True]),
        ("truncate", (0.5, 1.1), [1.1, 0.5, 1], [True, True, True]),
        ("truncate", (0.0, 2.0), [math.exp(0.2), math.exp(-2), 1], [True, True, True]),
        ("mask", (0.5, 2.0), [math.exp(0.2), 0, 1], [True, False, True]),
        ("mask", (0.1, 1.1), [0, math.exp(-2), 1], [False, True, True]),
    ],
)
def test_literals(kind, bounds, weights, kept):
    weight_B, keep_B = behavior_weights(OLD, BEHAVIOR, MASK, behavior_correction=kind, bounds=bounds)
    assert weight_B.tolist() == pytest.approx(weights)
    assert keep_B.tolist() == kept


def test_extreme_mismatch_stays_finite():
    weight_B, keep_B = behavior_weights(OLD * 1e6, BEHAVIOR, MASK, behavior_correction="mask", bounds=(0.0, 5.0))
    assert weight_B.tolist() == pytest.approx([0, 0, 1])
    assert keep_B.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("kind", "bounds", "message"),
    [
        ("clip", (0.5, 2.0), "behavior_correction is 'clip'"),
        ("mask", None, "bounds is None"),
        ("truncate", (1.5, 2.0), "0 <= lowest <= 1 <= highest"),
        ("none", (0.5, 2.0), "leave the bounds out"),
    ],
)
def test_refusals(kind, bounds, message):
    with pytest.raises(ValueError, match=message):
        behavior_weights(OLD, BEHAVIOR, MASK, behavior_correction=kind, bounds=bounds)
