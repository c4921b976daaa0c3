"""Changes that vLLM's loader of patches writes into weights that serve, without a reload of the layers.

A model may keep products or other copies of its weights, which no patch reaches. So the first changes of every kind of
tensor are a trial: a whole load of the same version follows, and both must leave the same tensors. Only after that do
changes count.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from gspo.common.weights.device_fingerprint import device_fingerprint
from gspo.generation.engine.worker.policy_tensors import mapped

# Each tensor of a patch is a whole one on the device, filled with NaN beside the changes.
_AT_A_TIME_BYTES = 1 << 28
# Attributes of a model's layers that are no weights: caches, which belong to requests.
_NO_WEIGHTS = ("kv_cache",)


class ChangesInPlace:
    """Loads changes into one model, and knows whether it may."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._tried: dict[str, tuple[int, int]] | None = None
        self._refuted = ""

    def load(self, path: str, tensors: Iterable[dict[str, Any]], device: torch.device, *, is_trial: bool) -> None:
        """Write changes of some tensors.

        Args:
            path: The file that has them.
            tensors: `name`, `dtype` and `shape` of each, `num_changed`, and the byte offsets `positions` (int32, in the
                flat tensor) and `elements` (their new values).
            is_trial: Whether a whole load of the same version follows.

        Raises:
            RuntimeError: A trial has left other tensors than the whole load. Nothing is written.
            Exception: Of the model's loader; some of the changes may be written.
        """
        if self._refuted:
            raise RuntimeError(f"weights: changes in place left another {self._refuted} than a whole load")
        group: list[CheckpointWeightPatch] = []
        num_bytes = 0
        for patch in _patches(path, tensors, device):
            group.append(patch)
            num_bytes += prod(patch.shape) * patch.dtype.itemsize
            if num_bytes >= _AT_A_TIME_BYTES:
                load_checkpoint_weight_patches(self._model, group, validate_unique_indices=False)
                group, num_bytes = [], 0
        load_checkpoint_weight_patches(self._model, group, validate_unique_indices=False)
        self._tried = _fingerprints(self._model) if is_trial else None

    def forget_trial(self) -> None:
        """The whole load after a trial has failed, so there is nothing to compare."""
        self._tried = None

    def compare(self) -> None:
        """A whole load has ended; if a trial came before it, both must have left the same tensors."""
        if self._tried is not None:
            tried, whole = self._tried, _fingerprints(self._model)
            self.forget_trial()
            self._refuted = next((it for it in {**tried, **whole} if tried.get(it) != whole.get(it)), "")


def _patches(path: str, tensors: Iterable[dict[str, Any]], device: torch.device) -> Iterator[CheckpointWeightPatch]:
    memory = mapped(path)
    for it in tensors:
        dtype = getattr(torch, it["dtype"])
        read = partial(torch.frombuffer, memory, count=it["num_changed"])
        elements, positions = read(dtype=dtype, offset=it["elements"]), read(dtype=torch.int32, offset=it["positions"])
        yield CheckpointWeightPatch(it["name"], tuple(it["shape"]), dtype, elements.to(device), positions.to(device))


def _fingerprints(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Those of all tensors of a model, by their paths in it."""
    return {path: tuple(device_fingerprint(_words(tensor)).tolist()) for path, tensor in all_tensors(model)}


def _words(tensor: Tensor) -> Tensor:
    """Its elements, of widths that fingerprints take."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.int32) if flat.element_size() > 4 else flat


def all_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a model leads to, with its path: parameters, buffers, and those that its layers keep otherwise.

    It follows containers, and the attributes of modules and of vLLM's objects.
    """
    pending: list[tuple[str, Any]] = [("model", model)]
    seen: dict[int, Any] = {}
    while pending:
        path, it = pending.pop()
        if id(it) in seen:
            continue
        seen[id(it)] = it  # kept: the number of an object that is gone may be given again
        if isinstance(it, Tensor):
            yield path, it
        pending.extend((f"{path}.{name}", part) for name, part in _parts(it) if name not in _NO_WEIGHTS)


def _parts(it: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(it, dict):
        return [(str(key), part) for key, part in it.items()]
    if isinstance(it, list | tuple):
        return [(str(number), part) for number, part in enumerate(it)]
    if isinstance(it, torch.nn.Module | Tensor) or type(it).__module__.startswith("vllm."):
        return list(getattr(it, "__dict__", {}).items())
    return []
