"""Packed attention and output layer as this device makes them in bfloat16, against float32; and AdamW's speed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gspo.common.planning.memory import FLOAT32_BYTES
from gspo.learner.model.attention import attention_of_line, attention_side_by_side, has_variable_length_attention
from gspo.learner.model.batch import PackedRollouts
from gspo_core.logprobs import token_logprobs
from tests.gpu.part_run import PartRun

# Positions of the rollouts of a line, the longest first.
_LENGTHS = {"cuda": (6000, 4000, 3000, 1500, 1000, 500, 300, 83, 1), "cpu": (40, 33, 20, 3, 1)}
_WINDOWS = {"full": None, "window": 16}
# Of 8 bits, through a softmax and two products.
_LARGEST_ERROR, _LARGEST_SIGMA = 0.02, 0.02
_TIMED = 5
# Weights of an optimizer step: 2 GiB of states.
# AdamW reads weight, gradient and two moments, and writes three of them.
_ADAM_TOUCHES = 7
_NUM_WEIGHTS = {"cuda": 1 << 27, "cpu": 1 << 16}


def run(case: PartRun) -> None:
    """Attention with and without a window, the output layer, and an optimizer step."""
    torch.manual_seed(0)
    for name, window in _WINDOWS.items():
        _attention(case, name, window)
    _output_layer(case)
    _optimizer(case)


def _attention(case: PartRun, name: str, window: int | None) -> None:
    sizes, lengths = case.sizes.model, _LENGTHS[case.device]
    line = PackedRollouts.of(lengths, max(lengths)).to(torch.device(case.device))
    heads = (sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["num_key_value_heads"])
    exact = [_leaf(case, torch.randn(sum(lengths), number, sizes["head_dim"])) for number in heads]
    rounded = [_leaf(case, tensor.bfloat16()) for tensor in exact]
    if case.device == "cuda":
        case.require(has_variable_length_attention(rounded[0], rounded[2]), "torch has no FlashAttention for this card")

    def ours() -> Tensor:
        return attention_of_line(nn.Module(), rounded, line, 0.0, None, sliding_window=window)

    def rows() -> Tensor:
        return attention_side_by_side(nn.Module(), rounded, line, 0.0, None, sliding_window=window)

    expected = attention_side_by_side(nn.Module(), exact, line, 0.0, None, sliding_window=window)
    weight = torch.randn_like(expected)
    errors = _errors((ours(), *rounded), (expected, *exact), weight)
    case.note(**{f"{name}_error": max(errors)})
    case.require(max(errors) < _LARGEST_ERROR, f"{name}: value and gradients differ by {errors}")
    of_rows = _seconds(case, rows, weight)
    case.judge(f"{name}: times faster than rows side by side", of_rows / _seconds(case, ours, weight), at_least=1)


def _output_layer(case: PartRun) -> None:
    sizes, num_tokens = case.sizes.model, sum(_LENGTHS[case.device])
    width, vocabulary = sizes["hidden_size"], sizes.get("vocab_size", 1000)
    hidden, weight = torch.randn(num_tokens, width), 2 * torch.randn(vocabulary, width) / width**0.5
    target_N = torch.randint(vocabulary, (num_tokens,), device=case.device)
    exact = [_leaf(case, hidden), _leaf(case, weight)]
    rounded = [_leaf(case, hidden.bfloat16()), _leaf(case, weight)]

    def head(inputs: list[Tensor]) -> Tensor:
        return token_logprobs(inputs[0], inputs[1], target_N)[0]

    expected_N, got_N = head(exact), head(rounded)
    case.note(output_layer_sigma=float((got_N - expected_N).detach().std()))
    case.require(
        float(case.numbers["output_layer_sigma"]) < _LARGEST_SIGMA, "rounding adds more noise than 8 bits explain"
    )
    errors = _errors((got_N, *rounded), (expected_N, *exact), torch.randn_like(expected_N))
    case.require(max(errors[1:]) < _LARGEST_ERROR, f"output layer: gradients differ by {errors[1:]}")
    ones_N = torch.ones_like(expected_N)
    in_float32 = _seconds(case, lambda: head(exact), ones_N)
    in_bfloat16 = _seconds(case, lambda: head(rounded), ones_N)
    case.judge("output layer: times faster than in float32", in_float32 / in_bfloat16, at_least=1)


def _optimizer(case: PartRun) -> None:
    """The learner's AdamW reads and writes each state once."""
    weight = _leaf(case, torch.zeros(_NUM_WEIGHTS[case.device]))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    seconds = _least_seconds(case, lambda: optimizer.step())
    touched_bytes_s = _ADAM_TOUCHES * FLOAT32_BYTES * weight.numel() / seconds
    case.note(optimizer_gb_s=touched_bytes_s / 1e9)


def _leaf(case: PartRun, tensor: Tensor) -> Tensor:
    return tensor.detach().to(case.device).requires_grad_()


def _errors(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...], weight: Tensor) -> list[float]:
    """For the value, then for the gradient of each input: the norm of the difference as a share."""
    for value, *_ in (ours, expected):
        (value.float() * weight).sum().backward()  # type: ignore[no-untyped-call]
    pairs = [(ours[0], expected[0]), *((a.grad, b.grad) for a, b in zip(ours[1:], expected[1:], strict=True))]
    return [float((a.float() - b).norm() / b.norm()) for a, b in pairs if a is not None and b is not None]


def _seconds(case: PartRun, forward: Callable[[], Tensor], weight: Tensor) -> float:
    """Seconds of a forward with its backward."""
    return _least_seconds(case, lambda: (forward() * weight).sum().backward())  # type: ignore[no-untyped-call]


def _least_seconds(case: PartRun, work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TIMED):
        case.synchronize()
        began = time.monotonic()
        work()
        case.synchronize()
        seconds.append(time.monotonic() - began)
    return min(seconds)
