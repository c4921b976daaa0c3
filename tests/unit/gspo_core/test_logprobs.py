"""Exact log-probs: by hand, against log_softmax, by finite differences, and never more logits than promised."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_core import logprobs
from gspo_core.logprobs import token_logprobs


def plain_logprobs(hidden, weight, target, temperature=1.0):
    logp_v = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return logp_v.gather(-1, target[..., None])[..., 0], -(logp_v.exp() * logp_v).sum(-1)


def case(*leading, D=8, V=40, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(*leading, D, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(V, leading)


def test_literal():
    hidden_BTD = torch.tensor([[[1.0]]])
    weight_VD = torch.tensor([[math.log(1.0)], [math.log(2.0)], [math.log(5.0)]])  # p = 1/8, 2/8, 5/8
    logp_BT, entropy_BT = token_logprobs(hidden_BTD, weight_VD, torch.tensor([[2]]))
    assert logp_BT.item() == pytest.approx(math.log(5 / 8))
    assert entropy_BT.item() == pytest.approx(-(math.log(1 / 8) + 2 * math.log(2 / 8) + 5 * math.log(5 / 8)) / 8)
    halved_BT, _ = token_logprobs(hidden_BTD, weight_VD, torch.tensor([[2]]), temperature=0.5)
    assert halved_BT.item() == pytest.approx(math.log(25 / 30))


@pytest.mark.parametrize("leading", [(7,), (3, 5), (2, 3, 4), (1, 1), (0,), (2, 0)])
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 1024])
def test_equals_log_softmax_forward_and_backward(leading, chunk_size):
    hidden, weight, target = case(*leading)
    up_logp, up_entropy = torch.randn(leading), torch.randn(leading)
    results = []
    for function, option in ((plain_logprobs, {}), (token_logprobs, {"chunk_size": chunk_size})):
        outputs = function(hidden, weight, target, temperature=0.7, **option)
        loss = (outputs[0] * up_logp + outputs[1] * up_entropy).sum()
        results.append((*outputs, *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_blocks_within_a_chunk_change_nothing(monkeypatch):
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


def test_finite_differences():
    hidden, weight, target = case(3, D=4, V=6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, target, temperature=1.3, chunk_size=4), (hidden, weight)
    )


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_output_and_one_input_with_a_gradient(output, frozen):
    hidden, weight, target = case(5)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    wanted = weight if frozen == "hidden" else hidden
    grads = []
    for function in (token_logprobs, plain_logprobs):
        grads += torch.autograd.grad(function(hidden, weight, target)[output].sum(), wanted)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


def test_large_vocabulary_against_float64():
    hidden, weight, target = case(3, D=64, V=151_936)
    weight = (weight / 8).detach().requires_grad_()
    results = []
    for function, dtype in ((token_logprobs, torch.float32), (plain_logprobs, torch.float64)):
        logp_N, entropy_N = function(hidden.to(dtype), weight.to(dtype), target)
        results.append((logp_N, entropy_N, *torch.autograd.grad((logp_N - entropy_N).sum(), (hidden, weight))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_extreme_logits_give_no_nan(scale):
    hidden, weight, target = case(6)
    logp_N, entropy_N = token_logprobs(hidden * scale, weight * scale, target)
    grads = torch.autograd.grad((logp_N + entropy_N).sum(), (hidden, weight))
    assert all(bool(torch.isfinite(result).all()) for result in (logp_N, entropy_N, *grads))


def test_bf16_is_multiplied_in_float32():
    hidden, weight, target = case(4, 3, D=64)
    hidden16, weight16 = (x.detach().to(torch.bfloat16).requires_grad_() for x in (hidden, weight))
    logp_BT, _ = token_logprobs(hidden16, weight16, target)
    expected_BT, _ = plain_logprobs(hidden16.float(), weight16.float(), target)
    torch.testing.assert_close(logp_BT, expected_BT, rtol=1e-5, atol=1e-5)
    logp_BT.sum().backward()
    assert hidden16.grad.dtype == weight16.grad.dtype == torch.bfloat16


def test_autocast_changes_nothing():
    hidden, weight, target = case(4, 3, D=64)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logp_BT, entropy_BT = token_logprobs(hidden, weight, target)
            grads = torch.autograd.grad((logp_BT + entropy_BT).sum(), (hidden, weight))
        results.append((logp_BT, entropy_BT, *grads))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


class LargestWithVocabulary(TorchDispatchMode):
    """Adds up the storage, in elements, of every tensor with a vocabulary dimension that is alive at one time."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.alive, self.most = vocabulary, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[-1] == self.vocabulary:
                storage = tensor.untyped_storage()
                self.alive[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        self.most = max(self.most, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("chunk_size", [2, 7, 16])
def test_never_more_logits_than_promised(chunk_size):
    """Buffers of a pass are counted as alive to its end, so this can only count too much."""
    hidden, weight, target = case(50, D=4, V=97)
    with LargestWithVocabulary(97) as forward:
        logp_N, entropy_N = token_logprobs(hidden, weight, target, chunk_size=chunk_size)
    with LargestWithVocabulary(97) as backward:
        (logp_N + entropy_N).sum().backward()
    for watched in (forward, backward):
        assert 0 < watched.most <= (chunk_size + weight.shape[1]) * 97  # weight^T, a view, is [D, V] too


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
def test_refusals(change, message):
    hidden, weight, target = case(1, 2)
    arguments = {"hidden_BTD": hidden, "weight_VD": weight, "target_BT": target} | change
    with pytest.raises(ValueError, match=message):
        token_logprobs(**arguments)
