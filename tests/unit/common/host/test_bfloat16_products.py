"""Products of bfloat16 matrices made in float32: rounded once, with gradients; float32 products keep their bits."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gspo.common.host import bfloat16_products
from gspo.common.host.bfloat16_products import use_float32_products
from tests.support.typed.gradients import backward, grad_of


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaced as on a processor without bfloat16, and torch's own again after the test."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert use_float32_products() and use_float32_products()
    yield
    assert bfloat16_products._library is not None
    bfloat16_products._library._destroy()  # type: ignore[no-untyped-call]
    bfloat16_products._library = None


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_processor_with_bfloat16_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert not use_float32_products()
    assert bfloat16_products._library is None


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("num_rows", [1, 3, 4, 64])
def test_products_are_rounded_once(num_rows: int) -> None:
    """A sum of 512 terms with a bias: bfloat16 differs from the float32 result by its last rounding alone."""
    x_BD, weight_VD, bias_V = matrix(num_rows, 512), matrix(96, 512, seed=1), matrix(96, seed=2)
    exact = functional.linear(x_BD.double(), weight_VD.double(), bias_V.double())
    result = functional.linear(x_BD, weight_VD, bias_V)
    assert result.dtype == torch.bfloat16
    if num_rows >= 4:
        assert torch.equal(result, functional.linear(x_BD.float(), weight_VD.float(), bias_V.float()).bfloat16())
    torch.testing.assert_close(result.double(), exact, rtol=2**-7, atol=0.3)


@pytest.mark.usefixtures("replaced")
def test_gradients_are_those_of_float32() -> None:
    x_BD, weight_VD = (matrix(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(8, 32), (16, 32)]))
    gradient_BV = matrix(8, 16, seed=2)
    backward(functional.linear(x_BD, weight_VD), gradient_BV)
    assert torch.equal(grad_of(x_BD), (gradient_BV.float() @ weight_VD.float()).bfloat16())
    assert torch.equal(grad_of(weight_VD), (gradient_BV.float().T @ x_BD.float()).bfloat16())


@pytest.mark.usefixtures("replaced")
def test_batches_scales_and_groups() -> None:
    x_BMK, y_BKM = matrix(3, 8, 16), matrix(3, 16, 8, seed=1)
    assert torch.equal(x_BMK @ y_BKM, (x_BMK.float() @ y_BKM.float()).bfloat16())
    added = torch.baddbmm(matrix(3, 8, 8, seed=2), x_BMK, y_BKM, beta=2, alpha=0.5)
    expected = torch.baddbmm(matrix(3, 8, 8, seed=2).float(), x_BMK.float(), y_BKM.float(), beta=2, alpha=0.5)
    assert torch.equal(added, expected.bfloat16())
    ends, rows, experts = torch.tensor([5, 8], dtype=torch.int32), matrix(8, 16), matrix(2, 16, 8, seed=3)
    grouped = functional.grouped_mm(rows, experts, offs=ends)
    assert torch.equal(grouped, torch.cat([rows[:5] @ experts[0], rows[5:] @ experts[1]]).to(torch.bfloat16))


def test_float32_keeps_its_bits(request: pytest.FixtureRequest) -> None:
    x_BD, weight_VD, bias_V = matrix(8, 64).float(), matrix(32, 64).float(), matrix(32).float()
    before = functional.linear(x_BD, weight_VD, bias_V)
    request.getfixturevalue("replaced")
    assert torch.equal(functional.linear(x_BD, weight_VD, bias_V), before)
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(x_BD.bfloat16(), weight_VD.T)
