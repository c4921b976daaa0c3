"""KL estimators: literals, signs, the clamp and what lies beyond it."""

import math

import pytest
import torch

from gspo_core.kl import kl_divergence
from tests.support.typed.gradients import backward, grad_of


def test_literals() -> None:
    logp_BT = torch.tensor([[-1.0, -2.0]])
    ref_logp_BT = torch.tensor([[-1.5, -1.0]])  # d = ref - logp = -0.5, 1
    torch.testing.assert_close(kl_divergence(logp_BT, ref_logp_BT, "k1"), torch.tensor([[0.5, -1.0]]))
    torch.testing.assert_close(kl_divergence(logp_BT, ref_logp_BT, "k2"), torch.tensor([[0.125, 0.5]]))
    k3_BT = torch.tensor([[0.10653066, 0.71828183]])  # exp(-0.5) + 0.5 - 1, e - 2
    torch.testing.assert_close(kl_divergence(logp_BT, ref_logp_BT), k3_BT)


def test_k1_and_k3_agree_in_the_mean_over_the_policy() -> None:
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.6, 0.3, 0.1])
    exact = 0.2 * math.log(1 / 3) + 0.5 * math.log(5)
    for kind in ("k1", "k3"):
        estimate = (p * kl_divergence(p.log()[None], q.log()[None], kind)[0]).sum()
        assert float(estimate) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("d", [-1e6, -100.0, 3.0, 100.0, 1e6])
def test_k3_is_clamped_and_has_no_gradient_beyond(d: float) -> None:
    logp_BT = torch.zeros(1, 1, requires_grad=True)
    k3_BT = kl_divergence(logp_BT, torch.tensor([[d]]))
    backward(k3_BT.sum())
    assert k3_BT.item() == 10.0
    assert grad_of(logp_BT).item() == 0.0


def test_gradient_of_k3_pulls_towards_the_reference() -> None:
    logp_BT = torch.tensor([[-1.0]], requires_grad=True)
    backward(kl_divergence(logp_BT, torch.tensor([[-2.0]])).sum())
    assert grad_of(logp_BT).item() == pytest.approx(1 - math.exp(-1))  # descent lowers logp, towards -2


def test_bf16_is_computed_in_float32() -> None:
    k3_BT = kl_divergence(torch.tensor([[-1.0]], dtype=torch.bfloat16), torch.tensor([[-1.0078125]]))
    assert k3_BT.dtype == torch.float32
    assert k3_BT.item() == pytest.approx(math.exp(-0.0078125) + 0.0078125 - 1, rel=1e-2)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"ref_logp_BT has shape \(1, 3\)"):
        kl_divergence(torch.zeros(1, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="kind is 'k4'"):
        kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2), "k4")
