"""Copies of the policy in host memory, in the inference dtype; each block of memory may be used again.

named_weights.py chooses the tensors, policy_weights.py makes a version of a copy.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo.common.errors import InputError
from gspo.common.host.machine import GIB

log = structlog.get_logger()
# torch's names of its allocators' settings, and ours: blocks from 64 MiB up are locked in their own size.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXACTLY_LOCKED = "pinned_max_round_threshold_mb:64"
Block = ctypes.Array[ctypes.c_uint8]
# Free blocks that are kept. Two are in use at a time: the newest version, and the version that is being made.
_MOST_KEPT = 2
# Parts whose copies a GPU may still owe: one is copied to the host while the next one is gathered.
_MOST_PARTS_IN_FLIGHT = 2


def lock_no_more_than_needed() -> None:
    """Lock as many pages of host memory as a large tensor has; settings of the user's own stay.

    torch rounds page-locked tensors up to a power of two, to use them again. DeepSpeed's offload locks a few large
    ones once, which could take twice their size.

    The loaded torch is asked, since not every version knows the setting (2.11 does not, 2.13 does). In an environment
    variable an unknown one would end the process at its first use of a GPU.
    """
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return
    try:
        torch._C._accelerator_setAllocatorSettings(EXACTLY_LOCKED)
    except (RuntimeError, ValueError) as error:
        detail = "an offload (learner.offload) may lock up to twice the memory that it needs"
        log.info("locked_memory_is_rounded", torch=torch.__version__, reason=str(error), detail=detail)


class HostCopies:
    """Makes copies of tensors of one device in one dtype.

    A copy from a GPU is cast there, so that only the narrower elements cross the bus, and runs on a stream of its own.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._blocks = ReusedBlocks(is_locked=device.type == "cuda")

    @contextmanager
    def begin(self, num_elements: int, *, is_reused: bool) -> Iterator[HostCopy]:
        """A copy of so many elements; at the end of the block they are all there, and the originals may change.

        Args:
            is_reused: Whether its memory is kept for later copies when it is free again.
        """
        num_bytes = num_elements * self._dtype.itemsize
        block = self._blocks.take(num_bytes) if is_reused else (ctypes.c_uint8 * num_bytes)()
        copy = HostCopy(block, self._dtype, self._stream)
        yield copy
        copy.wait()


class HostCopy:
    """One copy, tensor by tensor in one block of memory.

    Args:
        block: As many bytes as all the tensors will have.
        stream: On which a GPU copies; None on a CPU.
    """

    def __init__(self, block: Block, dtype: torch.dtype, stream: torch.cuda.Stream | None) -> None:
        self._block, self._dtype, self._stream = block, dtype, stream
        self._end = 0
        self._parts: deque[torch.cuda.Event] = deque()

    def add(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, whose elements are there after `wait`."""
        copy = self._place(tensor.shape)
        if self._stream is None:
            return copy.copy_(tensor)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor.to(self._dtype).contiguous(), non_blocking=True)
        # A gathered weight is freed before its copy has run; until then no other tensor may get its memory.
        tensor.record_stream(self._stream)
        return copy

    def end_part(self) -> None:
        """Some tensors that were gathered together are added; waits for earlier ones, so that a GPU holds few."""
        if self._stream is None:
            return
        self._parts.append(self._stream.record_event())
        if len(self._parts) == _MOST_PARTS_IN_FLIGHT:
            self._parts.popleft().synchronize()

    def wait(self) -> None:
        """Wait until every element is in host memory."""
        if self._stream is not None:
            self._stream.synchronize()

    def _place(self, shape: torch.Size) -> Tensor:
        begin, num_elements = self._end, shape.numel()
        self._end += num_elements * self._dtype.itemsize
        if not num_elements:
            return torch.empty(shape, dtype=self._dtype)
        return torch.frombuffer(self._block, dtype=self._dtype, count=num_elements, offset=begin).view(shape)


class ReusedBlocks:
    """Blocks of host memory; one that nothing refers to any more is given out again.

    Tensors and arrays in a block refer to it, so its memory never changes under them. Page-locked tensors of torch
    would not do: torch rounds each up to a power of two.

    Args:
        is_locked: Whether blocks are page-locked, so that a GPU writes to them directly. To lock one takes longer than
            to copy into it.
    """

    def __init__(self, *, is_locked: bool) -> None:
        self._is_locked = is_locked
        self._free: deque[NDArray[np.uint8]] = deque()

    def take(self, num_bytes: int) -> Block:
        """A block of so many bytes; free ones that are smaller are let go.

        Raises:
            InputError: It cannot be page-locked.
        """
        while self._free and self._free[0].nbytes < num_bytes:
            self._release(self._free.popleft())
        memory = self._free.popleft() if self._free else self._allocate(num_bytes)
        block = (ctypes.c_uint8 * num_bytes).from_buffer(memory.data)
        weakref.finalize(block, self._give_back, memory).atexit = False
        return block

    def _allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        memory = np.empty(num_bytes, np.uint8)
        # The result is an enumeration without a truth value of its own.
        if self._is_locked and (error := int(_cuda().cudaHostRegister(memory.ctypes.data, num_bytes, 0))):
            raise InputError(
                "model.path",
                f"{num_bytes / GIB:.1f} GiB of host memory cannot be page-locked (cudaError {error})",
                "Give the machine or container more memory, and the container no limit of locked memory "
                "(docker --ulimit memlock=-1)",
            )
        return memory

    def _give_back(self, memory: NDArray[np.uint8]) -> None:
        if len(self._free) < _MOST_KEPT:
            self._free.append(memory)
        else:
            self._release(memory)

    def _release(self, memory: NDArray[np.uint8]) -> None:
        if self._is_locked:
            _cuda().cudaHostUnregister(memory.ctypes.data)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
