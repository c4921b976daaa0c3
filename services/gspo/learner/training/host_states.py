"""Moves the states of training to host memory and back: weights, gradients, optimizer states, DeepSpeed's buffers.

Storages move, in place. Every tensor stays the same object over the same storage, so views stay views: parameters in
DeepSpeed's flat buffers, tied weights. DeepSpeed's own `offload_states` refuses torch's AdamW
at ZeRO 0 and 3 (version 0.19.8).
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor, UntypedStorage, nn

from gspo.learner.push.host_copies import ReusedBlocks

log = structlog.get_logger()
_DEEPSPEED = "deepspeed."
# DeepSpeed's classes whose buffer is filled anew with the gradients of each step: 2 GB under ZeRO 3 by default.
_REFILLED = ("IPGBucket", "IPGBucketZ3")


class HostStates:
    """The tensors of some objects, on a device or in host memory.

    A tensor that is away has its shape and no memory. Its use is an error on a GPU, and the end of the process on a
    CPU; rank_control.py lets no call through meanwhile.

    Args:
        roots: Models, engines and optimizers that hold the tensors, also indirectly.
        device: Where they are; tensors of other devices, as of an offloaded optimizer, stay there.
    """

    def __init__(self, roots: Sequence[object], device: torch.device) -> None:
        self._roots, self._device = roots, device
        self._blocks = ReusedBlocks(is_locked=True)
        # Each storage with its bytes: uint8 [bytes], on the meta device if they need not be kept.
        self._away: list[tuple[UntypedStorage, Tensor]] = []

    def move_to_host(self) -> int:
        """Copy every storage to host memory, and free the device's; returns the bytes that are kept.

        Of a GPU that memory is page-locked and used again the next time: to lock it takes longer than to copy.
        """
        self._synchronize()  # DeepSpeed has streams of its own
        is_gpu, storages = self._device.type == "cuda", _storages(self._roots, self._device.type)
        kept, end = sum(storage.nbytes() for storage, is_refilled in storages if not is_refilled), 0
        block = self._blocks.take(kept) if is_gpu and kept else (ctypes.c_uint8 * kept)()
        for storage, is_refilled in storages:
            size = storage.nbytes()
            if is_refilled:
                self._away.append((storage, torch.empty(size, dtype=torch.uint8, device="meta")))
                continue
            copy = torch.frombuffer(block, dtype=torch.uint8, count=size, offset=end)
            copy.copy_(_bytes_of(storage), non_blocking=True)
            self._away.append((storage, copy))
            end += size
        self._synchronize()
        for storage, _ in self._away:
            storage.resize_(0)
        if is_gpu:
            torch.cuda.empty_cache()
        stays = torch.cuda.memory_allocated(self._device) if is_gpu else 0
        log.info("states_in_host_memory", mib=kept >> 20, left_on_device_mib=stays >> 20)
        return kept

    def move_to_device(self) -> None:
        """Give every storage its memory and its bytes back; nothing to do where none is away."""
        for storage, copy in self._away:
            storage.resize_(copy.numel())
            if not copy.is_meta:
                _bytes_of(storage).copy_(copy, non_blocking=True)
        self._synchronize()
        self._away.clear()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(roots: Sequence[object], device_type: str) -> list[tuple[UntypedStorage, bool]]:
    """Each storage on a device once, and whether it is refilled. One that cannot be resized stays out.

    On a CPU such a one lies over memory that torch does not own: a weights file that is mapped.
    """
    met, refilled = dict[int, UntypedStorage](), set[int]()
    for holder in _holders(roots):
        if isinstance(holder, Tensor) and holder.device.type == device_type:
            storage = holder.untyped_storage()
            if storage.nbytes() and storage.resizable():
                met[storage._cdata] = storage
        elif type(holder).__name__ in _REFILLED:
            refilled |= {tensor.untyped_storage()._cdata for tensor in _holders([holder.buffer]) if tensor is not None}
    return [(storage, address in refilled) for address, storage in met.items()]


def _holders(roots: Sequence[object]) -> Iterator[Any]:
    """Everything that holds tensors, and the tensors: models, optimizers, DeepSpeed's objects; not the containers."""
    to_visit: list[Any] = list(roots)
    visited: dict[int, Any] = {}
    while to_visit:
        holder = to_visit.pop()
        if id(holder) in visited:
            continue
        visited[id(holder)] = holder
        if isinstance(holder, dict):
            to_visit += [*holder.keys(), *holder.values()]
        elif isinstance(holder, list | tuple | set | frozenset):
            to_visit += holder
        elif _may_hold_tensors(holder):
            yield holder
            # DeepSpeed hangs the parts of a parameter on the parameter.
            to_visit += vars(holder).values()
            if isinstance(holder, Tensor) and holder.is_leaf and holder.grad is not None:
                to_visit.append(holder.grad)


def _may_hold_tensors(holder: object) -> bool:
    kinds = (Tensor, nn.Module, torch.optim.Optimizer)
    return hasattr(holder, "__dict__") and (isinstance(holder, kinds) or type(holder).__module__.startswith(_DEEPSPEED))
