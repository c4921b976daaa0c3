"""The generator's two copies of the policy in shared memory: one serves, the next one is being staged.

`receiver.py` fills the staged copy, and `weights.py` loads it in vLLM's process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from gspo.common.errors import InputError
from gspo.common.host.machine import GIB, free_memory
from gspo.common.model.files import weight_files
from gspo.common.weights.changes import Packed, UnpackError, apply_changes
from gspo.common.weights.fingerprint import Fingerprint, fingerprint
from gspo.common.weights.manifest import ManifestEntry, manifest_digest
from gspo.generation.engine.tied_heads import tied_heads

# Cache lines; also more than any dtype's own alignment.
_ALIGNMENT = 64
# The inference dtypes, and the integer of the same width that carries their bits.
_BITS: Mapping[str, type[np.unsignedinteger[Any]]] = {
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
}


class StagingError(ValueError):
    """A frame does not fit this policy, for example its changes do not unpack."""


class ModelMismatchError(StagingError):
    """A frame is of another model's policy: every further push of its sender would be refused too."""


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor lies in a copy: `offset` bytes from its start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * np.dtype(_BITS[self.dtype]).itemsize


class PolicyCopy:
    """One whole policy in an anonymous shared-memory file.

    The file has no name (memfd), so it vanishes with the process. A container's small /dev/shm does not bound it. The
    processes of vLLM open it by the path of our file descriptor.

    Attributes:
        fingerprints: Those of the tensors of this policy, by name; the writers keep them up. A model folder may hold
            more tensors than the learner pushes: those that the architecture ignores.
    """

    def __init__(self, places: Mapping[str, TensorPlace], num_bytes: int) -> None:
        self._places = places
        # Of zeros.
        self.fingerprints = dict.fromkeys(places, Fingerprint())
        self._file = os.memfd_create("gspo-policy")
        # Reserved now: an error here instead of a SIGBUS in the middle of a push.
        try:
            os.posix_fallocate(self._file, 0, max(num_bytes, 1))
        except OSError as error:
            os.close(self._file)
            raise _not_enough_memory(num_bytes, str(error)) from error
        self._map = mmap.mmap(self._file, max(num_bytes, 1))

    def bits(self, name: str) -> NDArray[np.unsignedinteger[Any]]:
        """The tensor's elements as a flat writable view of unsigned integers of their width."""
        place = self._places[name]
        return np.frombuffer(self._map, _BITS[place.dtype], place.num_elements, place.offset)

    def put(self, name: str, bits: NDArray[np.unsignedinteger[Any]]) -> None:
        """Take over all elements of a tensor."""
        self.bits(name)[:] = bits
        self.fingerprints[name] = fingerprint(bits)

    def add(self, name: str, change: Fingerprint) -> None:
        """Some elements of a tensor have changed."""
        self.fingerprints[name] = self.fingerprints.get(name, Fingerprint()) + change

    def clear(self) -> None:
        """Have no tensor, and every element zero."""
        self.fingerprints.clear()
        np.frombuffer(self._map, np.uint8)[:] = 0

    def copy_from(self, other: PolicyCopy) -> None:
        """Take over the other copy's tensors."""
        self.fingerprints = dict(other.fingerprints)
        np.frombuffer(self._map, np.uint8)[:] = np.frombuffer(other._map, np.uint8)

    def digest(self) -> str:
        """That of its manifest."""
        places = ((self._places[name], number) for name, number in self.fingerprints.items())
        return manifest_digest(ManifestEntry(it.name, it.dtype, it.shape, str(number)) for it, number in places)

    def update_info(self) -> dict[str, Any]:
        """The fields of weights.SharedPolicy, by which vLLM's processes read this copy."""
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        present: list[dict[str, Any]] = []
        absent: list[dict[str, Any]] = []
        for place in self._places.values():
            (present if place.name in self.fingerprints else absent).append(asdict(place))
        return {"path": path, "tensors": present, "absent": absent}

    def close(self) -> None:
        os.close(self._file)


def _not_enough_memory(num_bytes: int, why: str) -> InputError:
    return InputError(
        "model.path",
        f"the policy that serves and the next one take {num_bytes / GIB:.2f} GiB of shared memory, and {why}",
        "Give this machine or container more memory, or take a smaller model or generation.dtype",
    )


class PolicyCopies:
    """Two copies of the policy in the inference dtype: `serving` is in the engine, `staged` is being filled.

    A push is `begin`, then `write` and `change`, then `staged_digest`, then Engine.load, which promotes. Calls block
    for as long as the memory takes: call them in a thread. Not safe for two pushes at a time.

    Args:
        tensors: Name and shape of every tensor that a policy may have.

    Attributes:
        places: Where each of them lies in a copy.
        num_bytes: Bytes of all of them.

    Raises:
        InputError: The memory is too small for both copies.
    """

    def __init__(self, tensors: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        self.places: dict[str, TensorPlace] = {}
        end = 0
        for name, shape in tensors.items():
            place = TensorPlace(name, dtype, tuple(shape), end)
            self.places[name] = place
            end += -(-place.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = sum(place.num_bytes for place in self.places.values())
        # Beyond a container's limit the kernel would kill this process instead of refusing it the memory.
        if 2 * end > (free := free_memory()):
            raise _not_enough_memory(2 * end, f"{free / GIB:.2f} GiB can be had")
        self._bits = _BITS[dtype]
        self.serving = PolicyCopy(self.places, end)
        self.staged = PolicyCopy(self.places, end)

    @classmethod
    def from_folder(cls, folder: Path, dtype: str, *, trust_remote_code: bool = False) -> PolicyCopies:
        """The policy of a model folder, cast as vLLM casts it at start, so that version 0 has a digest.

        Raises:
            FileNotFoundError: The folder has no safetensors or no config.json.
            InputError: config.json ties an output layer that the files hold with other values.
        """
        left_out = tied_heads(folder, trust_remote_code=trust_remote_code)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, part in _checkpoint_tensors(folder, left_out):
            shapes[name] = tuple(part.get_slice(name).get_shape())
        copies = cls(shapes, dtype)
        for name, part in _checkpoint_tensors(folder, left_out):
            copies.serving.put(name, _cast_bits(part.get_tensor(name), dtype))
        return copies

    def begin(self, *, changes: bool) -> None:
        """Start a push, of changes to `serving` or of whole tensors. A tensor that is left out changes the digest."""
        if changes:
            # To apply the last push's changes to the staged copy instead takes longer, even where 1 % has changed.
            self.staged.copy_from(self.serving)
        else:
            self.staged.clear()

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Put raw little-endian elements at flat position `offset` of a tensor (a large one comes in pieces)."""
        itemsize = np.dtype(self._bits).itemsize
        if len(data) % itemsize:
            raise StagingError(f"weights: {name}: {len(data)} bytes are not whole elements of {itemsize} bytes")
        run = self._run(name, offset, len(data) // itemsize)
        # A whole push begins with zeros, and to see them takes a tenth of the time.
        before = fingerprint(run, offset) if run.any() else Fingerprint()
        run[:] = np.frombuffer(data, self._bits)
        self.staged.add(name, fingerprint(run, offset) - before)

    def change(self, name: str, offset: int, num_elements: int, packed: Packed) -> None:
        """Apply packed changes to a run of a tensor's elements."""
        try:
            self.staged.add(name, apply_changes(self._run(name, offset, num_elements), packed, offset))
        except UnpackError as error:
            raise StagingError(f"weights: {name} from {offset} on: {error}") from error

    def serving_digest(self) -> str:
        return self.serving.digest()

    def staged_digest(self) -> str:
        return self.staged.digest()

    def differing_tensor(self) -> str | None:
        """A staged tensor with other bits than the serving one; None if there is none."""
        staged, serving = self.staged.fingerprints, self.serving.fingerprints
        return next((name for name in sorted(staged) if staged[name] != serving[name]), None)

    def promote(self) -> None:
        """Make the staged copy the serving one. Engine.load calls it after a good load."""
        self.serving, self.staged = self.staged, self.serving

    def close(self) -> None:
        self.serving.close()
        self.staged.close()

    def _run(self, name: str, offset: int, num_elements: int) -> NDArray[np.unsignedinteger[Any]]:
        """A run of a staged tensor's elements."""
        if name not in self.places:
            raise ModelMismatchError(
                f"weights: no tensor {name!r} in this model: sender and receiver hold different models"
            )
        in_all = self.places[name].num_elements
        if offset + num_elements > in_all:
            raise ModelMismatchError(
                f"weights: {name} has {in_all} elements; {num_elements} from {offset} on reach beyond its end: sender "
                "and receiver hold different models"
            )
        return self.staged.bits(name)[offset : offset + num_elements]


def _checkpoint_tensors(folder: Path, left_out: Collection[str]) -> Iterator[tuple[str, Any]]:
    """(name, open safetensors file) of every tensor of the folder that the policy may have, in a fixed order."""
    if not (files := weight_files(folder)):
        raise FileNotFoundError(f"model: {folder} has no .safetensors file; save the model with save_pretrained")
    for file in files:
        with safe_open(file, framework="pt") as part:
            for name in sorted(part.keys()):
                if name not in left_out:
                    yield name, part


def _cast_bits(tensor: torch.Tensor, dtype: str) -> NDArray[np.unsignedinteger[Any]]:
    """The flat elements of a tensor cast to `dtype`, as integers of the same width."""
    cast = tensor.to(getattr(torch, dtype)).contiguous().flatten()
    signed = torch.int32 if _BITS[dtype] is np.uint32 else torch.int16
    bits: NDArray[np.unsignedinteger[Any]] = cast.view(signed).numpy().view(_BITS[dtype])
    return bits
