"""Tensors that carry a device's name and compute on the CPU: a mix of devices is an error, as on a GPU.

The device is torch's private-use backend under the name "card". A tensor of it has a tensor of the CPU inside, on
which every operation runs. It raises CUDA's error if a CPU tensor is among the others, unless CUDA would take that
one: a number without dimensions in arithmetic, indices, and either side of a copy.

Not here: a GPU's memory, streams, kernels and rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "card"
aten = torch.ops.aten
_KEY, _AUTOCAST = "PrivateUse1", "AutocastPrivateUse1"
_COPIES = (aten.copy_.default, aten._to_copy.default)
# Of these a tensor on the GPU may have its indices on the CPU.
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
# These take a number on the CPU, though torch does not tag them as arithmetic.
_WITH_NUMBERS = (aten.where.self, aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill_.Tensor)
_PRODUCTS: tuple[Any, ...] = (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
_MOVE: Callable[..., nn.Module] = nn.Module._apply
# A library's kernels are gone with it.
_LIBRARIES: list[torch.library.Library] = []


class CardTensor(Tensor):
    """A tensor on the GPU.

    Attributes:
        inner: Its numbers, on the CPU; views share them.
    """

    inner: Tensor  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> CardTensor:
        """Wrap a tensor, without a copy."""
        wrapper: Any = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        wrapper.inner = inner
        return cast(CardTensor, wrapper)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CardTensor({self.inner!r})"

    def tolist(self) -> Any:
        """The numbers; torch refuses it for classes like this one."""
        return self.inner.tolist()

    @property
    def data(self) -> Tensor:
        """As torch's own, whose setter would leave `inner` as it was."""
        return self.detach()

    @data.setter  # type: ignore[override]
    def data(self, value: CardTensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.inner = value.inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on the tensors inside."""
        kwargs = dict(kwargs or {})
        if func.namespace == "c10d":
            return _communicate(func, args, kwargs)
        _refuse_other_devices(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        numbers = _inner(args)
        if func is aten.histc.default and not numbers[0].is_floating_point():
            return CardTensor(func(numbers[0].float(), *numbers[1:], **kwargs).to(numbers[0].dtype))  # as on a GPU
        result = func(*numbers, **_inner(kwargs))
        if device is not None and torch.device(device).type == "cpu":
            return result
        schema = func._schema
        values = [*zip(schema.arguments, args, strict=False), *((it, kwargs.get(it.name)) for it in schema.arguments)]
        written = [value for argument, value in values if _is_written(argument) and value is not None]
        if func is aten.copy_.default or any(map(_is_written, schema.returns)):
            return written[0] if len(schema.returns) == 1 else tuple(written)
        return _on_card(result)


def register() -> None:
    """Make "card" a device of this process, for good. Before the first backward pass, which starts a thread for it."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    # As for GPUs: a group of gloo may be made beside one that is bound to a device.
    distributed.Backend.backend_capability[distributed.Backend.GLOO].append(NAME)
    library: Any = torch.library.Library  # torch has no types for it
    kernels = library("aten", "IMPL")
    kernels.impl("empty.memory_format", _empty, _KEY)
    kernels.impl("empty_strided", _empty_strided, _KEY)
    kernels.impl("_copy_from", _copy_from, _KEY)
    for product in _PRODUCTS:
        kernels.impl(product.default.name().removeprefix("aten::"), partial(_rounded, product.default), _AUTOCAST)
    others = library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _AUTOCAST)
    _LIBRARIES.extend([kernels, others])
    nn.Module._apply = _move_whole  # type: ignore[method-assign]


class _Module(_DummyBackendModule):
    """torch.card."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Those of autocast."""
        return [torch.bfloat16]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _inner(values: Any) -> Any:
    return tree_map(lambda it: it.inner if isinstance(it, CardTensor) else it, values)


def _on_card(values: Any) -> Any:
    return tree_map(lambda it: CardTensor(it) if isinstance(it, Tensor) else it, values)


def _refuse_other_devices(func: Any, args: Any, kwargs: Any) -> None:
    others = [it for it in tree_iter((args, kwargs)) if isinstance(it, Tensor) and not isinstance(it, CardTensor)]
    if func in _COPIES:
        return
    if func in _INDEXED and isinstance(args[0], CardTensor):
        others = [it for it in args[2:3] if not isinstance(it, CardTensor) and it.dim()]
    elif torch.Tag.pointwise in func.tags or func in _WITH_NUMBERS:
        result = args[0] if func._schema.is_mutable else None
        others = [it for it in others if it.dim() or it is result]
    if others:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and {others[0].device}! ({func})"
        )


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return CardTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return CardTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, _non_blocking: bool = False) -> Tensor:
    """A copy where torch calls no method of the class, as in torch.tensor."""
    into, numbers = _inner((target, source))
    into.copy_(numbers)
    return target


def _rounded(product: Any, *args: Any, **kwargs: Any) -> Any:
    """A product under autocast."""
    dtype = torch.get_autocast_dtype(NAME)
    lower = [it.to(dtype) if isinstance(it, Tensor) and it.dtype == torch.float32 else it for it in args]
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _AUTOCAST))):
        return product(*lower, **kwargs)


def _move_whole(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """nn.Module's move to the GPU. Parameters stay the same objects, as on a GPU, so tied ones stay tied."""
    for weight in module._parameters.values():
        if weight is not None and not isinstance(weight, CardTensor):
            with torch.no_grad():
                changed = change(weight)
            if isinstance(changed, CardTensor):
                torch.utils.swap_tensors(weight, nn.Parameter(changed, weight.requires_grad))  # type: ignore[no-untyped-call]
    return _MOVE(module, change, recurse)


def _communicate(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective of a group that takes the GPU's tensors alone, by a group of the same ranks for the CPU's."""
    kinds = [str(argument.type) for argument in func._schema.arguments]
    arguments = [
        _group_of_cpu(value).boxed() if kind.endswith("c10d.ProcessGroup") else value
        for kind, value in zip(kinds, args, strict=False)
    ]
    return _on_card(func(*_inner(arguments), **_inner(kwargs)))


def _group_of_cpu(group: Any) -> Any:
    return _group_of_ranks(*distributed.get_process_group_ranks(distributed.ProcessGroup.unbox(group)))


@cache
def _group_of_ranks(*ranks: int) -> Any:
    return distributed.new_group(ranks, backend=f"cpu:gloo,{NAME}:gloo", use_local_synchronization=True)
