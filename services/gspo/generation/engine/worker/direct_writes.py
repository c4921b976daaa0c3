"""Tensors that a model's loader copies in itself, where others call a weight loader of vLLM's.

In an update vLLM's layers are on the meta device, and only calls of weight loaders are kept for the moment at which a
layer is complete. A plain copy into a tensor would be lost: gpt-oss loads its attention sinks and experts so, and some
eight other architectures of vLLM a tensor or two.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors, get_tensor_load_numel

T = TypeVar("T")


class DirectWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block in which copies into a layer's tensors count and last like those of weight loaders.

    Enter it between the start and the end of an update. The layer of such a tensor gets memory at the first copy, and
    is brought into serving form after the last one.

    Args:
        model: Has its layers in checkpoint form, on the meta device.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The tensors are kept with their places: the number of a storage that is gone may be given again.
        self._places: dict[int, tuple[torch.nn.Module, str, torch.Tensor]] = {}
        self._num_written = Counter[int]()
        self._in_loader = False
        for layer in model.modules():
            for name, tensor in get_layer_tensors(layer).items():
                if tensor.is_meta:
                    self._places[_storage(tensor)] = layer, name, tensor
                    if (loader := getattr(tensor, "weight_loader", None)) is not None:
                        tensor.weight_loader = self._noted(loader)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Redirect a write into a layer's tensor.

        Raises:
            RuntimeError: It is another operation, whose effect would be lost.
        """
        target = args[0] if args else None
        if not self._in_loader and isinstance(target, torch.Tensor) and target.is_meta and func._schema.is_mutable:
            key = _storage(target)
            if key in self._places:
                if func is not torch.ops.aten.copy_.default:
                    raise RuntimeError(f"weights: {self._places[key][1]} is loaded by {func}, which no update repeats")
                self._copy(key, target, args[1])
                return target
        return func(*args, **(kwargs or {}))

    def _noted(self, loader: Callable[..., T]) -> Callable[..., T]:
        """A weight loader whose copies vLLM counts itself; vLLM finds the original loader by its name and `wraps`."""

        @wraps(loader)
        def load(*args: Any, **kwargs: Any) -> T:
            self._in_loader = True
            try:
                return loader(*args, **kwargs)
            finally:
                self._in_loader = False

        return load

    def _copy(self, key: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy into the part of a layer's tensor that `target` is of the same tensor without memory."""
        layer, name, empty = self._places[key]
        info = get_layerwise_info(layer)
        if not info.can_load():
            return  # complete
        materialize_layer(layer, info)
        tensor = getattr(layer, name).data
        offset = target.storage_offset() - empty.storage_offset()
        tensor.as_strided(target.size(), target.stride(), offset).copy_(source)
        before = self._num_written[key]
        # A tensor may be written twice, and counts once.
        self._num_written[key] = min(before + target.numel(), get_tensor_load_numel(tensor))
        info.load_numel += self._num_written[key] - before
        if info.load_numel >= info.load_numel_total and not is_deferred_attention_layer(layer):
            _layerwise_process(layer, info)


def _storage(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor lies in, or would lie in: views of it have the same."""
    return int(tensor.untyped_storage()._cdata)
