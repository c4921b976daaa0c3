"""The parts of a training step's time on the GPU, by torch's profiler: attention, linear layers, head and others.

Ranges around the model's modules name the part of a kernel in the forward pass. In the backward pass it follows from
the sequence number that autograd gives an operation and its gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from gspo.learner.assembly.rows import Row
from gspo.learner.model.network import PolicyModel
from gspo.learner.training.trainer import Trainer
from tests.gpu.part_run import PartRun
from tests.support.training.rollout_rows import train, with_version

_RANGE, _GRADIENT = "gspo:", "autograd::engine::evaluate_function: "
_FORWARD = 0  # torch's RecordScope::FUNCTION; a gradient's has the number of its operation too
# Kernels of these operations are a part of their own, wherever they run.
_BY_OPERATION = {
    "aten::copy_": "casts and copies",
    "aten::fill_": "zeroing",
    "aten::_fused_adamw_": "optimizer",
    "aten::_foreach_norm": "optimizer",
    "aten::_foreach_mul_": "optimizer",
}
# Of operations in no range, as those of compiled layers are.
_PRODUCTS = {"aten::mm": "linear layers", "aten::addmm": "linear layers", "aten::bmm": "linear layers"}
_ATTENTION = ("flash", "varlen", "scaled_dot_product", "efficient_attention", "causalattention")


def note_breakdown(case: PartRun, trainer: Trainer, step: int, rows: list[Row], step_s: float) -> None:
    """Profile one step: note the seconds of each part of it, and those in which the GPU waited.

    Args:
        step_s: Seconds of a step without the profiler, which slows the host.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if case.on_gpu else [])]
    with _named_modules(trainer), profile(activities=activities) as profiled:
        train(trainer, step, with_version(rows, step - 1))
        case.synchronize()
    by_part = seconds_by_part(profiled.events() or [], own_seconds if case.on_gpu else host_seconds)
    for name, seconds in sorted(by_part.items(), key=lambda item: -item[1]):
        case.note(**{f"{name.replace(' ', '_').replace(',', '')}_s": seconds})
    busy_s = sum(by_part.values())
    case.note(busy_s=busy_s, waiting_s=max(0.0, step_s - busy_s))
    case.require(busy_s > 0, "the profiler saw no kernel")


@contextmanager
def _named_modules(trainer: Trainer) -> Iterator[None]:
    """Ranges around what the model's modules do, while the block runs."""
    policy: PolicyModel = trainer.engine.model
    handles, forward = [], policy._logprobs

    def head(*args: Any) -> Any:
        with record_function(f"{_RANGE}head and loss"):
            return forward(*args)

    policy._logprobs = head  # type: ignore[assignment]
    # A range within a compiled layer would cut it to pieces.
    is_compiled = trainer._config.learner.torch_compile
    for module in () if is_compiled else policy.causal_lm.modules():
        if name := _part_of_module(module):
            handles += _ranges(module, name)
    try:
        yield
    finally:
        policy._logprobs = forward  # type: ignore[method-assign]
        for handle in handles:
            handle.remove()


def _part_of_module(module: nn.Module) -> str:
    """The part that a module's own operations belong to; empty where they are those of the module around it."""
    kind = type(module).__name__
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return "linear layers" if isinstance(module, nn.Linear) else "embedding"
    endings = {"Norm": "norms", "MLP": "activations", "Attention": "rotary", "RotaryEmbedding": "rotary"}
    endings |= {"Experts": "experts", "DecoderLayer": "residual sums"}
    return next((part for ending, part in endings.items() if kind.endswith(ending)), "")


def _ranges(module: nn.Module, name: str) -> list[Any]:
    begun: list[record_function] = []

    def begin(*_: Any) -> None:
        begun.append(record_function(f"{_RANGE}{name}"))
        begun[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(*_: Any) -> None:
        begun.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]


def own_seconds(event: FunctionEvent) -> float:
    """Seconds of the kernels that an operation itself started on the GPU."""
    return float(sum(kernel.duration for kernel in event.kernels)) / 1e6


def host_seconds(event: FunctionEvent) -> float:
    """Seconds of an operation itself on a CPU; none of a range."""
    return 0.0 if event.name.startswith(_RANGE) else float(event.self_cpu_time_total) / 1e6


def seconds_by_part(events: Iterable[FunctionEvent], seconds: Callable[[FunctionEvent], float]) -> dict[str, float]:
    """Seconds of each part, of the operations of a profile."""
    ordered = sorted(events, key=lambda event: float(event.time_range.start))
    # The last operation that begins under a number is the one that autograd gives it to.
    forward: dict[tuple[int | None, int], str] = {
        (event.thread, event.sequence_nr): _range_around(event)
        for event in ordered
        if event.sequence_nr >= 0 and event.scope == _FORWARD and not event.name.startswith(_GRADIENT)
    }
    sums: dict[str, float] = defaultdict(float)
    for event in ordered:
        if own_s := seconds(event):
            sums[_part_of(event, forward)] += own_s
    return dict(sums)


def _part_of(event: FunctionEvent, forward: Mapping[tuple[int | None, int], str]) -> str:
    name = event.name
    if part := _BY_OPERATION.get(name):
        return part
    around: FunctionEvent | None = event
    while around is not None:
        if any(word in around.name.lower() for word in _ATTENTION):
            return "attention"  # also what it calls
        if around.name.startswith(_RANGE):
            return str(around.name.removeprefix(_RANGE))
        if around.name.startswith(_GRADIENT):
            if "AccumulateGrad" in around.name:
                return "sums of gradients"
            if "TokenLogprobs" in around.name:
                return "head and loss"
            if part := forward.get((around.fwd_thread, around.sequence_nr)):
                return part
        around = around.cpu_parent
    return "compiled kernels" if name.startswith("triton_") else _PRODUCTS.get(name, "rest")


def _range_around(event: FunctionEvent) -> str:
    around: FunctionEvent | None = event
    while around is not None:
        if around.name.startswith(_RANGE):
            return str(around.name.removeprefix(_RANGE))
        around = around.cpu_parent
    return ""
