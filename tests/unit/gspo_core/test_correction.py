"""Behavior correction: the weight of a sequence or a token, capped or masked, and what is reported of it."""

import math
from typing import Any

import pytest
import torch

from gspo_core.correction import behavior_stats, behavior_weights
from gspo_core.stats import figures

OLD = torch.tensor([[0.4, 0.0, 9.0], [-3.0, -1.0, -2.0], [5.0, 5.0, 5.0]])  # row means 0.2, -2, none
BEHAVIOR = torch.zeros(3, 3)
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize(
    ("kind", "bounds", "weights", "kept"),
    [
        ("truncate", (0.5, 1.1), [1.1, 0.5, 1], [True, True, True]),
        ("truncate", (0.0, 2.0), [math.exp(0.2), math.exp(-2), 1], [True, True, True]),
        ("mask", (0.5, 2.0), [math.exp(0.2), 0, 1], [True, False, True]),
        ("mask", (0.1, 1.1), [0, math.exp(-2), 1], [False, True, True]),
    ],
)
def test_a_weight_for_each_sequence(
    kind: str, bounds: tuple[float, float], weights: list[Any], kept: list[Any]
) -> None:
    weight_BT, keep_BT = behavior_weights(OLD, BEHAVIOR, MASK, behavior_correction=kind, bounds=bounds)
    assert weight_BT.shape == keep_BT.shape == OLD.shape
    for t in range(3):
        assert weight_BT[:, t].tolist() == pytest.approx(weights)
        assert keep_BT[:, t].tolist() == kept


@pytest.mark.parametrize(
    ("kind", "weights", "kept"),
    [
        ("truncate", [[1.4, 1, 1], [0.1, math.exp(-1), math.exp(-2)], [1, 1, 1]], [[True] * 3] * 3),
        (
            "mask",
            [[0, 1, 1], [0, math.exp(-1), math.exp(-2)], [1, 1, 1]],
            [[False, True, True], [False, True, True], [True] * 3],
        ),
    ],
)
def test_a_weight_for_each_token(kind: str, weights: list[Any], kept: list[Any]) -> None:
    # exp(0.4) = 1.49 and exp(-3) = 0.05 are outside; what stands on padding, 9 and 5, has no weight of its own.
    weight_BT, keep_BT = behavior_weights(
        OLD, BEHAVIOR, MASK, behavior_correction=kind, behavior_level="token", bounds=(0.1, 1.4)
    )
    torch.testing.assert_close(weight_BT, torch.tensor(weights))
    assert keep_BT.tolist() == kept


def test_the_product_of_a_long_answer_is_near_nothing_unless_it_is_bounded() -> None:
    """A drift of -0.01 a token, which no other level sees: exp(-0.01) each, exp(-4) over 400 tokens."""
    old_BT, behavior_BT, mask_BT = torch.full((2, 400), -1.01), torch.full((2, 400), -1.0), torch.ones(2, 400)
    mask_BT[1, 10:] = 0
    options = {"behavior_correction": "truncate", "behavior_level": "product"}
    free_BT, _ = behavior_weights(old_BT, behavior_BT, mask_BT, bounds=(0.0, 2.0), **options)
    assert free_BT[:, 0].tolist() == pytest.approx([math.exp(-4), math.exp(-0.1)], rel=1e-4)
    bounded_BT, _ = behavior_weights(old_BT, behavior_BT, mask_BT, bounds=(0.5, 2.0), **options)
    assert bounded_BT[:, 0].tolist() == pytest.approx([0.5, math.exp(-0.1)], rel=1e-4)
    before = figures(behavior_stats(old_BT, behavior_BT, mask_BT, behavior_level="product", bounds=(0.5, 2.0)))
    assert before["behavior_log_weight"] == pytest.approx(-(400 * 4 + 10 * 0.1) / 410, rel=1e-4)
    assert before["behavior_weight_mean"] == pytest.approx((400 * math.exp(-4) + 10 * math.exp(-0.1)) / 410, rel=1e-4)


@pytest.mark.parametrize("level", ["geometric", "token", "product"])
def test_extreme_mismatch_stays_finite(level: str) -> None:
    options: dict[str, Any] = {"behavior_correction": "mask", "behavior_level": level, "bounds": (0.0, 5.0)}
    weight_BT, keep_BT = behavior_weights(OLD * 1e6, BEHAVIOR, MASK, **options)
    assert torch.isfinite(weight_BT).all()
    assert (weight_BT[0, 0].item(), keep_BT[0, 0].item()) == (0.0, False)
    assert weight_BT[1].tolist() == pytest.approx([0, 0, 0])
    assert keep_BT[1:].all()


def test_what_is_reported_is_counted_over_tokens_and_before_the_bounds() -> None:
    reported = figures(behavior_stats(OLD, BEHAVIOR, MASK, bounds=(0.5, 2.0)))
    assert reported["behavior_weight_mean"] == pytest.approx((2 * math.exp(0.2) + 3 * math.exp(-2)) / 5)
    assert reported["behavior_weight_max"] == pytest.approx(math.exp(0.2))
    assert reported["behavior_outside"] == pytest.approx(3 / 5)
    by_token = figures(behavior_stats(OLD, BEHAVIOR, MASK, behavior_level="token", bounds=(0.1, 1.4)))
    assert by_token["behavior_outside"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"behavior_correction": "clip"}, "behavior_correction is 'clip'"),
        ({"behavior_level": "sequence"}, "behavior_level is 'sequence'; it must be one of token, geometric, product"),
        ({"bounds": (1.5, 2.0)}, "0 <= lowest <= 1 <= highest"),
        ({"bounds": (0.5, math.inf)}, "0 <= lowest <= 1 <= highest"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    options = {"behavior_correction": "mask", "bounds": (0.5, 2.0)} | change
    with pytest.raises(ValueError, match=message):
        behavior_weights(OLD, BEHAVIOR, MASK, **options)
