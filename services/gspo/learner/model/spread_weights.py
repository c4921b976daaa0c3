"""Weights that are spread over the ranks while they are loaded, and whole again for a module that runs alone.

A rank never holds more of the policy than its parts and the weights at hand. policy_engine.py says how a weight is
spread and gathered.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gspo.learner.model.named_weights import Whole

_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"


@dataclass(frozen=True)
class Spreading:
    """How weights are spread over the ranks. Every rank makes the same calls in the same order.

    Attributes:
        spread: Leaves each rank its part of parameters that are whole on all of them.
        whole: Gathers such parameters for a block.
        device: Where the parts are gathered.
    """

    spread: Callable[[Sequence[nn.Parameter]], None]
    whole: Whole
    device: torch.device


@contextmanager
def each_loaded(change: Callable[[nn.Module, nn.Parameter], None], *, one_by_one: bool) -> Iterator[None]:
    """A block in which `change` sees each parameter that transformers loads, with its module.

    Args:
        one_by_one: Read a tensor only after the parameter before it has been seen; transformers reads ahead in threads,
            as far as it can.

    transformers makes a model without values (on torch's device "meta"), then reads, converts and registers one
    parameter after another.
    """

    def hook(module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            change(module, parameter)

    handle, before = register_module_parameter_registration_hook(hook), os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = str(int(one_by_one))
    try:
        yield
    finally:
        handle.remove()
        del os.environ[_ONE_BY_ONE]
        if before is not None:
            os.environ[_ONE_BY_ONE] = before


@contextmanager
def whole_where_used(model: nn.Module, whole: Whole) -> Iterator[None]:
    """A block in which a model with spread weights can run: those of a layer are whole while the layer runs."""
    open_blocks: dict[nn.Module, AbstractContextManager[object]] = {}

    def gather(module: nn.Module, *_: object) -> None:
        open_blocks[module] = whole(parameters_of[module])
        open_blocks[module].__enter__()

    def release(module: nn.Module, *_: object) -> None:
        open_blocks.pop(module).__exit__(None, None, None)

    parameters_of = dict(_units(model))
    with ExitStack() as stack:
        for module in parameters_of:
            stack.callback(module.register_forward_pre_hook(gather).remove)
            stack.callback(module.register_forward_hook(release).remove)
        try:
            yield
        finally:
            for module in list(open_blocks):  # of a forward that failed
                release(module)


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Modules with the parameters that they use: a layer with all of its own, another module with those it holds.

    A layer may use a weight of a module within it without running that module.
    """
    if own := list(module.parameters(recurse=False)):
        yield module, own
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((layer, list(layer.parameters())) for layer in child)
        else:
            yield from _units(child)
