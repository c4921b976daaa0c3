"""Exact log-probs: by hand, against log_softmax, by finite differences, and never more logits than promised."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_core import logprobs
from gspo_core.logprobs import token_logprobs
from tests.support.typed.gradients import backward, grad_of


def plain_logprobs(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    logp_v = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return logp_v.gather(-1, target[..., None])[..., 0], -(logp_v.exp() * logp_v).sum(-1)


def case(*leading: int, D: int = 8, V: int = 40, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(*leading, D, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(V, leading)


def test_literal() -> None:
    hidden_BTD = torch.tensor([[[1.0]]])
    weight_VD = torch.tensor([[math.log(1.0)], [math.log(2.0)], [math.log(5.0)]])  # p = 1/8, 2/8, 5/8
    logp_BT, entropy_BT = token_logprobs(hidden_BTD, weight_VD, torch.tensor([[2]]))
    assert logp_BT.item() == pytest.approx(math.log(5 / 8))
    assert entropy_BT.item() == pytest.approx(-(math.log(1 / 8) + 2 * math.log(2 / 8) + 5 * math.log(5 / 8)) / 8)
    halved_BT, _ = token_logprobs(hidden_BTD, weight_VD, torch.tensor([[2]]), temperature=0.5)
    assert halved_BT.item() == pytest.approx(math.log(25 / 30))


@pytest.mark.parametrize("leading", [(7,), (3, 5), (2, 3, 4), (1, 1), (0,), (2, 0)])
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 1024])
def test_equals_log_softmax_forward_and_backward(leading: tuple[int, ...], chunk_size: int) -> None:
    hidden, weight, target = case(*leading)
    up_logp, up_entropy = torch.randn(leading), torch.randn(leading)
    results = []
    for function, option in ((plain_logprobs, {}), (token_logprobs, {"chunk_size": chunk_size})):
        outputs = function(hidden, weight, target, temperature=0.7, **option)
        loss = (outputs[0] * up_logp + outputs[1] * up_entropy).sum()
        results.append((*outputs, *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_blocks_within_a_chunk_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 rows in blocks of 3, the last of each cut short."""
    hidden, weight, target = case(21)
    up_logp, up_entropy = torch.randn(21), torch.randn(21)
    results = []
    for numbers in (logprobs.BLOCK_NUMBERS, 3 * len(weight)):
        monkeypatch.setattr(logprobs, "BLOCK_NUMBERS", numbers)
        logp_N, entropy_N = token_logprobs(hidden, weight, target, chunk_size=16)
        loss = (logp_N * up_logp + entropy_N * up_entropy).sum()
        results.append((logp_N, entropy_N, *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


def test_finite_differences() -> None:
    hidden, weight, target = case(3, D=4, V=6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, target, temperature=1.3, chunk_size=4), (hidden, weight)
    )


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_output_and_one_input_with_a_gradient(output: int, frozen: str) -> None:
    hidden, weight, target = case(5)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    wanted = weight if frozen == "hidden" else hidden
    grads: list[Tensor] = []
    for function in (token_logprobs, plain_logprobs):
        grads += torch.autograd.grad(function(hidden, weight, target)[output].sum(), wanted)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


def test_large_vocabulary_against_float64() -> None:
    hidden, weight, target = case(3, D=64, V=151_936)
    weight = (weight / 8).detach().requires_grad_()
    results = []
    for function, dtype in ((token_logprobs, torch.float32), (plain_logprobs, torch.float64)):
        logp_N, entropy_N = function(hidden.to(dtype), weight.to(dtype), target)
        results.append((logp_N, entropy_N, *torch.autograd.grad((logp_N - entropy_N).sum(), (hidden, weight))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_extreme_logits_give_no_nan(scale: float) -> None:
    hidden, weight, target = case(6)
    logp_N, entropy_N = token_logprobs(hidden * scale, weight * scale, target)
    grads = torch.autograd.grad((logp_N + entropy_N).sum(), (hidden, weight))
    assert all(bool(torch.isfinite(result).all()) for result in (logp_N, entropy_N, *grads))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bf16_states_are_multiplied_by_a_bf16_weight_and_added_up_in_float32(weight_dtype: torch.dtype) -> None:
    hidden, weight, target = case(4, 3, D=64)
    hidden16, weight16 = hidden.detach().bfloat16(), weight.detach().bfloat16()
    ours = hidden16.clone().requires_grad_(), weight16.clone().to(weight_dtype).requires_grad_()
    plain = hidden16.float().requires_grad_(), weight16.float().requires_grad_()
    got, expected = token_logprobs(*ours, target, temperature=0.7), plain_logprobs(*plain, target, temperature=0.7)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    backward((got[0] - got[1]).sum())
    backward((expected[0] - expected[1]).sum())
    assert [grad_of(tensor).dtype for tensor in ours] == [torch.bfloat16, weight_dtype]
    for tensor, reference in zip(ours, plain, strict=True):
        # The gradient of the logits is rounded too: 8 bits.
        assert (grad_of(tensor).float() - grad_of(reference)).norm() < 2**-8 * grad_of(reference).norm()


def test_bf16_factors_add_little_noise() -> None:
    """To peaked distributions at a real width; its products alone are rounded, not the logits."""
    hidden, weight, _ = case(64, D=1024, V=20_000)
    weight = 4 * weight / 32
    target = torch.multinomial((hidden @ weight.T).softmax(-1), 1)[:, 0]
    exact, _ = token_logprobs(hidden, weight, target)
    rounded, _ = token_logprobs(hidden.bfloat16(), weight, target)
    logits = (hidden.bfloat16() @ weight.bfloat16().T).float()
    all_rounded = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    assert 0 < (rounded - exact).std() < 0.02 < (all_rounded - exact).std()


def test_autocast_changes_nothing() -> None:
    hidden, weight, target = case(4, 3, D=64)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logp_BT, entropy_BT = token_logprobs(hidden, weight, target)
            grads = torch.autograd.grad((logp_BT + entropy_BT).sum(), (hidden, weight))
        results.append((logp_BT, entropy_BT, *grads))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


class LargestWithVocabulary(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storage, in elements, of every tensor with a vocabulary dimension that is alive at one time."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary, self.most = vocabulary, 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[-1] == self.vocabulary:
                storage = tensor.untyped_storage()
                self.alive[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        self.most = max(self.most, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("chunk_size", [2, 7, 16])
def test_never_more_logits_than_promised(chunk_size: int) -> None:
    """Buffers of a pass are counted as alive to its end, so this can only count too much."""
    hidden, weight, target = case(50, D=4, V=97)
    with LargestWithVocabulary(97) as forward_pass:
        logp_N, entropy_N = token_logprobs(hidden, weight, target, chunk_size=chunk_size)
    with LargestWithVocabulary(97) as backward_pass:
        backward((logp_N + entropy_N).sum())
    for watched in (forward_pass, backward_pass):
        assert 0 < watched.most <= (chunk_size + weight.shape[1]) * 97  # weight^T, a view, is [D, V] too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_the_vocabulary_is_kept_for_the_backward_pass_but_the_weight(dtype: torch.dtype) -> None:
    hidden, weight, target = case(50, D=4, V=97)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(hidden.detach().to(dtype).requires_grad_(), weight, target)
    assert sorted(tensor.numel() for tensor in kept) == sorted([hidden.numel(), weight.numel(), 50, 50])
    assert any(tensor is weight or tensor.data_ptr() == weight.data_ptr() for tensor in kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_BT": torch.tensor([[0, 40]])}, "the vocabulary has 0 to 39"),
        ({"target_BT": torch.tensor([[0, -100]])}, "ids from -100 to 0"),
        ({"target_BT": torch.tensor([0, 1])}, "target has shape"),
        ({"weight_VD": torch.zeros(40, 7)}, "weight"),
        ({"temperature": 0.0}, r"temperature is 0\.0"),
        ({"chunk_size": 0}, "chunk_size is 0"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    hidden, weight, target = case(1, 2)
    arguments = {"hidden_BTD": hidden, "weight_VD": weight, "target_BT": target} | change
    with pytest.raises(ValueError, match=message):
        token_logprobs(**arguments)
