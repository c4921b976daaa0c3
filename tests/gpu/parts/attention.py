"""Packed attention and output layer as this device makes them in bfloat16, against float32; and AdamW's speed."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

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
# Positions of lines of four rollouts, which take these shares.
_LINES = {"cuda": (4096, 8192, 16_384, 32_768), "cpu": (16, 64)}
_SHARES = (2, 4, 8, 8)
# Modules of flash-attn's function for packed lines, the newer first.
_FLASH_ATTN = ("flash_attn_interface", "flash_attn")
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
    for num_positions in _LINES[case.device]:
        _line(case, num_positions)
    _output_layer(case)
    _optimizer(case)


def _attention(case: PartRun, name: str, window: int | None) -> None:
    lengths = _LENGTHS[case.device]
    line, exact = _packed(case, lengths)
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


def _packed(case: PartRun, lengths: tuple[int, ...]) -> tuple[PackedRollouts, list[Tensor]]:
    """A line of rollouts, and random float32 queries, keys and values of its positions."""
    sizes = case.sizes.model
    heads = (sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["num_key_value_heads"])
    tensors = [_leaf(case, torch.randn(sum(lengths), number, sizes["head_dim"])) for number in heads]
    return PackedRollouts.of(lengths, max(lengths)).to(torch.device(case.device)), tensors


def _line(case: PartRun, num_positions: int) -> None:
    """Times of full attention over a line, also of flash-attn's kernels where they are installed."""
    lengths = tuple(num_positions // share for share in _SHARES)
    line, exact = _packed(case, lengths)
    rounded = [_leaf(case, tensor.bfloat16()) for tensor in exact]
    weight = torch.randn(rounded[0].shape, device=case.device)
    arguments: Any = (nn.Module(), rounded, line, 0.0, None)
    ours_s = _seconds(case, lambda: attention_of_line(*arguments), weight)
    rows_s = _seconds(case, lambda: attention_side_by_side(*arguments), weight)
    case.note(**{f"line_of_{num_positions}_ms": ours_s * 1e3})
    case.judge(f"line of {num_positions}: times faster than rows side by side", rows_s / ours_s, at_least=1)
    module = next((name for name in _FLASH_ATTN if importlib.util.find_spec(name)), None)
    if module is None or not case.on_gpu:
        return
    function = importlib.import_module(module).flash_attn_varlen_func
    start_R = torch.tensor([0, *lengths], device=case.device).cumsum(0).int()

    def theirs() -> Tensor:
        out = function(*rounded, start_R, start_R, max(lengths), max(lengths), causal=True)
        attended: Tensor = out[0] if isinstance(out, tuple) else out
        return attended

    case.note(**{f"{module}_of_{num_positions}_ms": _seconds(case, theirs, weight) * 1e3})


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
