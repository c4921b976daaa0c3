"""CISPO and DPPO by hand: which tokens keep their gradient, with which weight, and refusals."""

import math
from typing import Any

import pytest
import torch

from gspo_core.loss import LOSS_AGG_MODES
from gspo_core.stats import figures
from gspo_core.token_losses import binary_divergence
from tests.support.typed.gradients import backward, grad_of
from tests.unit.gspo_core.loss.objective_loss import objective_loss


def gradient_of(
    p: float, q: float, A: float, objective: str, low: float = 0.2, high: float = 0.3, **options: Any
) -> tuple[float, tuple[float, float]]:
    """Gradient in log p of a single token's loss, and the shares cut below and above."""
    logp_BT = torch.tensor([[math.log(p)]], dtype=torch.float64, requires_grad=True)
    old_BT, A_BT = torch.tensor([[math.log(q)]], dtype=torch.float64), torch.tensor([[A]])
    if not objective.startswith("dppo"):
        options = {"importance_sampling": "token", **options}
    loss, stats = objective_loss(
        logp_BT, old_BT, A_BT, torch.ones(1, 1), objective=objective, low=low, high=high, **options
    )
    backward(loss)
    seen = figures(stats)
    return grad_of(logp_BT).item(), (seen["clipped_low_tokens"], seen["clipped_high_tokens"])


@pytest.mark.parametrize(
    ("p", "q", "A", "weight", "bounded"),
    [
        (0.5, 0.5, 1.0, 1.0, (0, 0)),
        (0.5, 0.25, 1.0, 1.3, (0, 1)),  # the ratio 2 counts as 1.3, where the clip would take the token out
        (0.5, 0.25, -1.0, 1.3, (0, 1)),
        (0.25, 0.5, -1.0, 0.8, (1, 0)),
        (0.25, 0.5, 1.0, 0.8, (1, 0)),
    ],
)
def test_cispo_bounds_the_weight_of_a_token_and_never_takes_it_out(
    p: float, q: float, A: float, weight: float, bounded: tuple[int, int]
) -> None:
    slope, cut = gradient_of(p, q, A, "cispo")
    assert slope == pytest.approx(-weight * A)
    assert cut == bounded


def test_cispo_has_the_gradient_of_gspo_where_no_weight_is_bounded() -> None:
    """With one advantage a sequence, and whether the ratio is seq or seq_token."""
    torch.manual_seed(0)
    old_BT, A_B1 = -torch.rand(4, 6, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    mask_BT = torch.arange(6) < torch.tensor([6, 1, 3, 4])[:, None]
    moved_BT = old_BT + 0.05 * torch.randn(4, 6, dtype=torch.float64)
    for mode in LOSS_AGG_MODES:
        gradients = []
        for objective, kind in (("clip", "seq"), ("cispo", "seq"), ("cispo", "seq_token")):
            logp_BT = moved_BT.clone().requires_grad_()
            options: dict[str, Any] = {"objective": objective, "importance_sampling": kind}
            options |= {"low": 0.9, "high": 9.0}
            loss, _ = objective_loss(
                logp_BT, old_BT, A_B1.expand(4, 6), mask_BT, loss_agg_mode=mode, max_response_length=9, **options
            )
            backward(loss)
            gradients.append(grad_of(logp_BT))
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("p", "q", "A", "is_cut"),
    [
        (1e-3, 1e-5, 1.0, False),  # a ratio of 100, and next to no probability moved
        (0.6, 0.99, -1.0, True),  # a ratio that the clip of 0.2 lets through at 0.8, and 0.39 moved
        (0.6, 0.99, 1.0, False),  # back towards where it was sampled
        (0.9, 0.5, 1.0, True),
        (0.9, 0.5, -1.0, False),
    ],
)
def test_dppo_cuts_by_the_probability_moved_away_and_not_by_the_ratio(
    p: float, q: float, A: float, is_cut: bool
) -> None:
    slope, cut = gradient_of(p, q, A, "dppo_tv", low=0.2, high=0.3)
    assert slope == (0.0 if is_cut else pytest.approx(-A * p / q))
    assert sum(cut) == is_cut


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.25), (0.25, 0.5), (1e-3, 1e-5), (1.0, 0.5), (0.5, 1.0), (1.0, 1.0)])
def test_the_divergences_are_those_of_a_coin(p: float, q: float) -> None:
    logp_BT, old_BT = torch.tensor([[math.log(p)]]), torch.tensor([[math.log(q)]])
    assert binary_divergence(logp_BT, old_BT, "dppo_tv").item() == pytest.approx(abs(p - q), rel=1e-5, abs=1e-7)
    rest = 0.0 if q == 1 else (1 - q) * math.log((1 - q) / max(1 - p, 1e-12))
    expected = q * math.log(q / p) + rest
    assert binary_divergence(logp_BT, old_BT, "dppo_kl").item() == pytest.approx(expected, rel=1e-4, abs=1e-10)


@pytest.mark.parametrize("objective", ["cispo", "dppo_tv", "dppo_kl"])
def test_what_stands_on_padding_reaches_neither_loss_nor_gradient(objective: str) -> None:
    logp_BT = torch.tensor([[-0.5, math.nan], [-0.3, -math.inf]], requires_grad=True)
    old_BT, mask_BT = torch.tensor([[-0.4, math.nan], [-0.6, 1.0]]), torch.tensor([[1, 0], [1, 0]])
    A_BT = torch.tensor([[1.0, math.nan], [-1.0, math.inf]])
    options: dict[str, Any] = {"importance_sampling": "token"} if objective == "cispo" else {}
    loss, stats = objective_loss(logp_BT, old_BT, A_BT, mask_BT, objective=objective, **options)
    backward(loss)
    assert math.isfinite(loss.item())
    assert bool(torch.isfinite(grad_of(logp_BT)).all())
    assert not grad_of(logp_BT)[:, 1].any()
    assert all(math.isfinite(value) for value in figures(stats).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "dppo_js"}, "kind is 'dppo_js'; it must be 'dppo_tv' or 'dppo_kl'"),
        ({"objective": "dppo_tv", "low": 1.5}, "pg_clip_low is 1.5"),
        ({"objective": "cispo", "high": math.inf}, "pg_clip_high is inf"),
        ({"objective": "cispo", "importance_sampling": "sequence"}, "importance_sampling is 'sequence'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gradient_of(0.5, 0.5, 1.0, **options)
