"""The tensors of a policy's file in shared memory: where they are, or brought to the GPU in large copies.

A GPU copies page-locked memory at the speed of its bus. It gets other memory in small pieces, and a loader waits for
one tensor after another.
"""

import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BUFFER_BYTES = 1 << 26
# One thread alone reads more slowly than a GPU's bus.
_READERS = 4
# A layer's tensors stay on the GPU until its last one, and vLLM needs memory to repack it.
_FREE_BYTES = 2 << 30
log = logging.getLogger(__name__)
Place = dict[str, Any]


def mapped(path: str) -> mmap.mmap:
    """A shared file, privately: vLLM's loaders may write to their tensors without changing it."""
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def host_tensors(path: str, places: Sequence[Place]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each place: its `name`, `dtype`, `shape`, and byte `offset` in the file."""
    memory = mapped(path)
    for place in places:
        dtype, shape = _form(place)
        flat = torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=place["offset"])
        yield place["name"], flat.reshape(shape)


class DeviceTensors:
    """Reads files through two buffers: one is filled while the device copies the other.

    Args:
        device: On CPUs, for tests, the buffers are not page-locked.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._device = device
        self._buffers = [_locked(buffer_bytes, device), _locked(buffer_bytes, device)]
        self._copied: list[Any] = [None, None]
        self._next = 0

    def read(self, path: str, places: Sequence[Place]) -> Iterator[tuple[str, Tensor]]:
        """As host_tensors, on the device; in host memory while the device has too little."""
        with Path(path).open("rb", buffering=0) as file, ThreadPoolExecutor(_READERS) as readers:
            for run in self._runs(places):
                begin, end = run[0]["offset"], _end(run[-1])
                if not self._has_memory(end - begin):
                    yield from host_tensors(path, run)
                    continue
                bytes_N = self._bytes(file.fileno(), readers, begin, end)
                for place in run:
                    dtype, shape = _form(place)
                    its = bytes_N[place["offset"] - begin : _end(place) - begin]
                    yield place["name"], its.view(dtype).reshape(shape)

    def _runs(self, places: Sequence[Place]) -> Iterator[list[Place]]:
        """Neighbours that fit into a buffer together, and larger tensors alone."""
        run: list[Place] = []
        for place in places:
            is_behind = run and place["offset"] >= _end(run[-1])
            if run and not (is_behind and _end(place) - run[0]["offset"] <= len(self._buffers[0])):
                yield run
                run = []
            run.append(place)
        if run:
            yield run

    def _bytes(self, file: int, readers: ThreadPoolExecutor, begin: int, end: int) -> Tensor:
        bytes_N = torch.empty(end - begin, dtype=torch.uint8, device=self._device)
        for piece in torch.split(bytes_N, len(self._buffers[0])):
            buffer = self._free_buffer()[: len(piece)]
            parts = [part.numpy() for part in buffer.chunk(_READERS)]
            offsets = [begin]
            for part in parts:
                offsets.append(offsets[-1] + len(part))
            list(readers.map(_fill, [file] * len(parts), parts, offsets))
            begin = offsets[-1]
            piece.copy_(buffer, non_blocking=True)
            self._note_copy()
        return bytes_N

    def _free_buffer(self) -> Tensor:
        if self._copied[self._next] is not None:
            self._copied[self._next].synchronize()
        return self._buffers[self._next]

    def _note_copy(self) -> None:
        if self._device.type == "cuda":
            self._copied[self._next] = torch.cuda.current_stream(self._device).record_event()
        self._next = 1 - self._next

    def _has_memory(self, num_bytes: int) -> bool:
        if self._device.type != "cuda":
            return True
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return num_bytes + _FREE_BYTES <= torch.cuda.mem_get_info(self._device)[0] + cached


def _locked(num_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            log.warning("weights come through memory that is not page-locked, which is slower: %s", error)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _form(place: Place) -> tuple[torch.dtype, list[int]]:
    return getattr(torch, place["dtype"]), place["shape"]


def _end(place: Place) -> int:
    dtype, shape = _form(place)
    end: int = place["offset"] + prod(shape) * dtype.itemsize
    return end


def _fill(file: int, part: Any, offset: int) -> None:
    """Read whole bytes at an offset.

    Raises:
        EOFError: The file ends before.
    """
    view = memoryview(part)
    while view:
        num_read = os.preadv(file, [view], offset)
        if not num_read:
            raise EOFError(f"the policy's file ends at byte {offset}")
        view, offset = view[num_read:], offset + num_read
