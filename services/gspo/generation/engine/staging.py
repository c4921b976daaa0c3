"""The generator's copies of the policy in shared memory: one serves, the next one is being staged.

`receiver.py` fills the staged copy, and `weights.py` loads it in vLLM's process. Generators of one host have their
copies in one file (`policy_file.py`): what one has staged, the others load.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
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
from gspo.generation.engine.policy_file import FILLING, WHOLE, PolicyFile
from gspo.generation.engine.tied_heads import tied_heads

# Cache lines; also more than any dtype's own alignment.
_ALIGNMENT = 64
# A generator that fills a slot and has put nothing for so long may be stopped, or its sender slow.
_STILL_S = 10.0
# Between two looks whether it has filled it.
LOOK_S = 0.05
# At a time, between two notes of progress.
_COPIED_BYTES = 1 << 28
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


class PolicyPlace(Enum):
    """Where a policy is on this host."""

    HERE = "it is staged"
    ELSEWHERE = "another generator is filling a slot with it"
    NOWHERE = "no generator has it"


class PolicyCopy:
    """One whole policy in a slot of the file.

    Attributes:
        places: Where its tensors lie, by name.
        slot: Its number. This generator has the slot's lock: for itself until `finish`, shared after it.
        fingerprints: Those of the tensors of this policy, by name; the writers keep them up. A model folder may hold
            more tensors than the learner pushes: those that the architecture ignores.
    """

    def __init__(self, file: PolicyFile, slot: int, places: Mapping[str, TensorPlace]) -> None:
        self.slot, self._file, self.places = slot, file, places
        self._map, self._note = file.map_policy(slot), file.map_note(slot)
        is_there = self._note["present"].astype(bool)
        lanes = self._note["fingerprints"].tolist()
        self.fingerprints = {
            name: Fingerprint(*both) for name, present, both in zip(places, is_there, lanes, strict=True) if present
        }

    @property
    def is_whole(self) -> bool:
        """Whether the policy is whole, and other generators may load it."""
        return bool(self._note["state"] == WHOLE)

    def bits(self, name: str) -> NDArray[np.unsignedinteger[Any]]:
        """The tensor's elements as a flat writable view of unsigned integers of their width."""
        place = self.places[name]
        return np.frombuffer(self._map, _BITS[place.dtype], place.num_elements, place.offset)

    def put(self, name: str, bits: NDArray[np.unsignedinteger[Any]]) -> None:
        """Take over all elements of a tensor."""
        self.bits(name)[:] = bits
        self.fingerprints[name] = fingerprint(bits)
        self._note["progress_s"] = time.monotonic()

    def add(self, name: str, change: Fingerprint) -> None:
        """Some elements of a tensor have changed."""
        self.fingerprints[name] = self.fingerprints.get(name, Fingerprint()) + change
        self._note["progress_s"] = time.monotonic()

    def claim(self, digest: str, *, is_start: bool) -> None:
        """Note what the slot is going to have.

        Args:
            is_start: Whether it is the policy of the model folder.
        """
        self._note["is_start"], self._note["progress_s"] = is_start, time.monotonic()
        self._note["digest"], self._note["state"] = digest.encode(), FILLING

    def begin(self, base: PolicyCopy | None) -> None:
        """Give the slot its memory, with the tensors of `base`, or with zeros.

        Raises:
            StagingError: There is none.
        """
        is_zero = not self._file.has_memory(self.slot)
        problem = f"no memory for a policy of {len(self._map) / GIB:.2f} GiB"
        if is_zero and len(self._map) > (free := free_memory()):
            raise StagingError(f"{problem}: {free / GIB:.2f} GiB are free")
        try:
            self._file.reserve(self.slot)
        except OSError as error:
            raise StagingError(f"{problem}: {error}") from error
        self.fingerprints = dict(base.fingerprints) if base is not None else {}
        if base is None and is_zero:
            return
        for first in range(0, len(self._map), _COPIED_BYTES):
            part = slice(first, first + _COPIED_BYTES)
            np.frombuffer(self._map, np.uint8)[part] = 0 if base is None else np.frombuffer(base._map, np.uint8)[part]
            self._note["progress_s"] = time.monotonic()

    def finish(self) -> None:
        """The policy is whole: other generators of this host may load it."""
        names = list(self.places)
        self._note["present"] = [name in self.fingerprints for name in names]
        numbers = [self.fingerprints.get(name, Fingerprint()) for name in names]
        self._note["fingerprints"] = np.array([(it.first, it.second) for it in numbers], np.uint64).reshape(-1, 2)
        self._note["digest"], self._note["state"] = self.digest().encode(), WHOLE
        self._file.share(self.slot)

    def digest(self) -> str:
        """That of its manifest."""
        places = ((self.places[name], number) for name, number in self.fingerprints.items())
        return manifest_digest(ManifestEntry(it.name, it.dtype, it.shape, str(number)) for it, number in places)

    def update_info(self) -> dict[str, Any]:
        """The fields of weights.SharedPolicy, by which vLLM's processes read this copy."""
        begin = self._file.offset(self.slot)
        present: list[dict[str, Any]] = []
        absent: list[dict[str, Any]] = []
        for name, place in self.places.items():
            described = {"name": name, "dtype": place.dtype, "shape": place.shape, "offset": begin + place.offset}
            (present if name in self.fingerprints else absent).append(described)
        return {"path": self._file.path, "tensors": present, "absent": absent}


def _not_enough_memory(num_bytes: int, why: str) -> InputError:
    return InputError(
        "model.path",
        f"the policy that serves and the next one take {num_bytes / GIB:.2f} GiB of shared memory, and {why}",
        "Give this machine or container more memory, or take a smaller model or generation.dtype",
    )


class PolicyCopies:
    """Copies of the policy in the inference dtype: `serving` is in the engine, `staged` is the next one.

    A push is `find`; for a policy that this host has not, also `begin`, `write` and `change`, `staged_digest` and
    `finish`. Then comes Engine.load, which promotes. Calls block for as long as the memory takes: call them in a
    thread. Not safe for two pushes at a time.

    Args:
        tensors: Name and shape of every tensor that a policy may have.
        file: That of the generators of this host; None for this process alone.
        source: Identifies the files that the first policy is read from.

    Attributes:
        places: Where each tensor lies in a copy.
        num_bytes: Bytes of all of them.

    Raises:
        InputError: The memory is too small for two copies.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[int, ...]], dtype: str, file: Path | None = None, source: str = ""
    ) -> None:
        self.places: dict[str, TensorPlace] = {}
        end = 0
        for name, shape in tensors.items():
            place = TensorPlace(name, dtype, tuple(shape), end)
            self.places[name] = place
            end += -(-place.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = sum(place.num_bytes for place in self.places.values())
        self._bits = _BITS[dtype]
        layout = hashlib.sha256(f"{source} {list(self.places.values())}".encode()).hexdigest()
        self._file = PolicyFile(file, layout, end, len(self.places))
        # Beyond a container's limit the kernel would kill this process instead of refusing it the memory.
        if 2 * end - self._file.used_bytes > (free := free_memory()):
            raise _not_enough_memory(2 * end, f"{free / GIB:.2f} GiB can be had")
        self._locked: set[int] = set()
        self.serving = self.staged = self._start()

    @classmethod
    def from_folder(
        cls, folder: Path, dtype: str, *, trust_remote_code: bool = False, file: Path | None = None
    ) -> PolicyCopies:
        """The policy of a model folder, cast as vLLM casts it at start, so that version 0 has a digest.

        Raises:
            FileNotFoundError: The folder has no safetensors or no config.json.
            InputError: config.json ties an output layer that the files hold with other values.
        """
        left_out = tied_heads(folder, trust_remote_code=trust_remote_code)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, part in _checkpoint_tensors(folder, left_out):
            shapes[name] = tuple(part.get_slice(name).get_shape())
        source = " ".join(f"{it} {it.stat().st_size} {it.stat().st_mtime_ns}" for it in weight_files(folder))
        copies = cls(shapes, dtype, file, source)
        if not copies.serving.is_whole:
            for name, part in _checkpoint_tensors(folder, left_out):
                copies.serving.put(name, _cast_bits(part.get_tensor(name), dtype))
            copies.serving.finish()
        return copies

    def find(self, digest: str) -> PolicyPlace:
        """Look for a policy on this host. If it is there, it is staged; if not, this generator is to take it."""
        self.abandon()
        if self.serving.digest() == digest:
            return PolicyPlace.HERE
        with self._file.alone():
            place, copy = self._located(lambda note: note["digest"] == digest.encode())
            if place is PolicyPlace.NOWHERE:
                copy = self._claimed(digest)
        self.staged = copy or self.serving
        return place

    def begin(self, *, changes: bool) -> None:
        """Stage changes to `serving`, or whole tensors. A tensor that is left out changes the digest.

        Raises:
            StagingError: There is no memory for another copy.
        """
        if self.staged is self.serving:
            with self._file.alone():
                self.staged = self._claimed("")
        # To apply the last push's changes to the staged copy instead takes longer, even where 1 % has changed.
        self.staged.begin(self.serving if changes else None)

    def finish(self) -> None:
        """The staged policy has the announced digest: other generators of this host may load it too."""
        self.staged.finish()

    def abandon(self) -> None:
        """Have nothing staged."""
        if self.staged is not self.serving:
            self._release(self.staged.slot)
        self.staged = self.serving

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
        if self.staged is not self.serving:
            self._release(self.serving.slot)
        self.serving = self.staged

    def close(self) -> None:
        self._file.close()

    def _start(self) -> PolicyCopy:
        """The policy of the model folder, if another generator has read it or does so now; else one of zeros."""
        while True:
            with self._file.alone():
                place, copy = self._located(lambda note: bool(note["is_start"]))
                if place is PolicyPlace.NOWHERE:
                    copy = self._claimed("", is_start=True)
            if copy is not None:
                break
            time.sleep(LOOK_S)
        if place is PolicyPlace.HERE:
            return copy
        try:
            copy.begin(None)
        except StagingError as error:
            raise _not_enough_memory(2 * self.num_bytes, str(error)) from error
        copy.fingerprints = dict.fromkeys(self.places, Fingerprint())  # of zeros
        return copy

    def _located(self, is_it: Callable[[Any], bool]) -> tuple[PolicyPlace, PolicyCopy | None]:
        """Where a policy with such a note is; one that is here is locked for reading."""
        slots = [slot for slot in self._others() if is_it(self._file.map_note(slot))]
        for slot in slots:
            if copy := self._shared(slot):
                return PolicyPlace.HERE, copy
        return PolicyPlace.ELSEWHERE if any(map(self._is_being_filled, slots)) else PolicyPlace.NOWHERE, None

    def _shared(self, slot: int) -> PolicyCopy | None:
        """The whole policy of a slot, locked for reading; None if it has none."""
        if not self._file.share(slot):
            return None
        self._locked.add(slot)
        if (copy := PolicyCopy(self._file, slot, self.places)).is_whole:
            return copy
        self._release(slot)
        return None

    def _release(self, slot: int) -> None:
        """Let others overwrite a slot."""
        self._file.release(slot)
        self._locked.discard(slot)

    def _is_being_filled(self, slot: int) -> bool:
        """Whether a generator has locked a slot for itself, to put tensors into it or to look for a slot."""
        if self._file.share(slot):
            self._file.release(slot)
            return False
        note = self._file.map_note(slot)
        return bool(note["state"] == WHOLE or time.monotonic() - note["progress_s"] < _STILL_S)

    def _others(self) -> list[int]:
        """The slots that this generator has not locked."""
        return [slot for slot in range(len(self._file)) if slot not in self._locked]

    def _claimed(self, digest: str, *, is_start: bool = False) -> PolicyCopy:
        """A copy in a slot that no other generator needs: the oldest one, or else a new one."""
        free = [slot for slot in self._others() if self._file.seize(slot)]
        used = sorted((slot for slot in free if self._file.has_memory(slot)), key=self._filled_at)
        chosen = next(iter(used or free), None)
        # A generator that starts again is going to look for the newest one.
        newest = max(range(len(self._file)), key=self._filled_at, default=None)
        for slot in free:
            if slot in used and slot not in (chosen, newest):
                self._file.drop(slot)
            if slot != chosen:
                self._file.release(slot)
        if chosen is None:
            chosen = len(self._file)
            self._file.extend()
            self._file.seize(chosen)
        self._locked.add(chosen)
        copy = PolicyCopy(self._file, chosen, self.places)
        copy.claim(digest, is_start=is_start)
        return copy

    def _filled_at(self, slot: int) -> tuple[bool, float]:
        """Whole policies after others, and by time: a run that is resumed may count its versions again."""
        note = self._file.map_note(slot)
        return bool(note["state"] == WHOLE), float(note["progress_s"])

    def _run(self, name: str, offset: int, num_elements: int) -> NDArray[np.unsignedinteger[Any]]:
        """A run of a staged tensor's elements."""
        if name not in self.places:
            raise ModelMismatchError(
                f"weights: no tensor {name!r} in this model: sender and receiver hold different models"
            )
        if self.staged is self.serving:
            raise StagingError("weights: no push has begun")
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
