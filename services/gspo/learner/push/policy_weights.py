"""A policy version as raw bits, and the update that brings it to a generator: every element, or changes.

A push compares and sends bits, so that no number changes. With several ranks each has the bits of the tensors that it
owns. Rank zero has the manifest of all.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.common.weights.changes import Bits, pack_changes
from gspo.common.weights.manifest import (
    ManifestEntry,
    digest_of_before,
    entries_of,
    entries_of_before,
    is_of_before,
    manifest_digest,
)
from gspo.learner.training.trainer_api import NotFiniteError
from gspo_proto.generation_pb2 import Changes, PushHeader, TensorFrame, WeightFrame

UpdateKind = Literal["full", "changes"]
# Far below gRPC's limit for a message. Larger ones are slower (4 MiB: a third of the rate): each copy of one is memory
# that the allocator takes from the system anew.
FRAME_BYTES = 2**20
# Runs of elements that are packed at a time, each in a thread.
PACKING_THREADS = 4
_BITS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16, torch.float16: torch.uint16}


@dataclass(frozen=True)
class PolicyFacts:
    """A version without its weights.

    Attributes:
        num_bytes: Size of all tensors.
        sources: Addresses of the ranks that serve the tensors which rank zero does not own.
    """

    version: int
    digest: str
    dtype: str
    num_tensors: int
    num_bytes: int
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class PolicyWeights:
    """One version of the policy in the inference dtype: its manifest, and this rank's weights in host memory.

    Attributes:
        digest: The manifest's; empty on other ranks than zero.
        entries: The manifest, of all tensors; on other ranks than zero of their own.
        bits: Name of each tensor that this rank owns -> its elements as unsigned integers of the same width, in their
            shape.
        digest_on_record: Its digest, of the kind that an earlier record of the version has.
    """

    version: int
    digest: str
    dtype: str
    entries: tuple[ManifestEntry, ...]
    bits: Mapping[str, NDArray[np.unsignedinteger[Any]]]
    digest_on_record: str = ""
    sources: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all tensors of the manifest."""
        num_elements = sum(prod(entry.shape) for entry in self.entries)
        return num_elements * getattr(torch, self.dtype).itemsize if num_elements else 0

    @property
    def facts(self) -> PolicyFacts:
        """The version without its weights."""
        return PolicyFacts(self.version, self.digest, self.dtype, len(self.entries), self.num_bytes, self.sources)


class RankManifest(NamedTuple):
    """The part of a manifest that one rank makes.

    Attributes:
        dtype: Empty from a rank that owns nothing.
        address: Where generators pull the rank's tensors; empty for rank zero.
        not_finite: Names of tensors with weights that are no finite numbers; such a version has no entries.
        before: Entries of the older kind, where a record has that kind.
    """

    dtype: str
    address: str
    num_tensors: int
    not_finite: Sequence[str]
    entries: Sequence[ManifestEntry]
    before: Sequence[ManifestEntry]

    def to_bytes(self) -> bytes:
        """One line of JSON."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, line: bytes) -> RankManifest:
        """The part that `to_bytes` wrote."""
        *facts, entries, before = json.loads(line)
        parts = (
            [ManifestEntry(name, dtype, tuple(shape), number) for name, dtype, shape, number in part]
            for part in (entries, before)
        )
        return cls(*facts, *parts)


def weights_from(version: int, tensors: Mapping[str, torch.Tensor], recorded: str = "") -> PolicyWeights:
    """A policy from contiguous CPU tensors of one dtype, which must not change afterwards.

    Args:
        recorded: The digest on record for this version, whose kind `digest_on_record` has; empty without one.

    Raises:
        NotFiniteError: A weight is infinite or NaN: no generator may sample from such a version.
    """
    return joined(version, own_weights(version, tensors), [rank_manifest(tensors, recorded)])


def own_weights(version: int, tensors: Mapping[str, torch.Tensor]) -> PolicyWeights:
    """The tensors that this rank owns, without a manifest."""
    dtype = _dtype_of(tensors)
    bits = {name: tensor.view(_BITS[tensor.dtype]).numpy() for name, tensor in tensors.items()}
    entries = tuple(ManifestEntry(name, dtype, tensor.shape, "") for name, tensor in bits.items())
    return PolicyWeights(version, "", dtype, entries, bits)


def rank_manifest(tensors: Mapping[str, torch.Tensor], recorded: str = "", address: str = "") -> RankManifest:
    """The manifest of the tensors that this rank owns; the arguments as for `weights_from`."""
    dtype = _dtype_of(tensors)
    if not_finite := [name for name, tensor in tensors.items() if not _is_finite(tensor)]:
        return RankManifest(dtype, address, len(tensors), not_finite, [], [])
    named = [(name, dtype, tuple(it.shape), it.view(_BITS[it.dtype]).numpy()) for name, it in tensors.items()]
    before = entries_of_before(named) if is_of_before(recorded) else []
    return RankManifest(dtype, address, len(tensors), not_finite, entries_of(named), before)


def joined(version: int, own: PolicyWeights, parts: Sequence[RankManifest]) -> PolicyWeights:
    """A version from this rank's tensors and the manifest of every rank.

    Raises:
        NotFiniteError: As for `weights_from`.
    """
    if not_finite := [name for part in parts for name in part.not_finite]:
        raise NotFiniteError(
            f"version {version} is not published: {len(not_finite)} of {sum(part.num_tensors for part in parts)} of "
            f"its tensors hold weights that are no finite numbers, first {not_finite[0]}"
            + (". Lower learner.learning_rate and resume" if version else "")
        )
    (dtype,) = {part.dtype for part in parts if part.dtype}
    entries, before = (tuple(it for part in parts for it in getattr(part, kind)) for kind in ("entries", "before"))
    digest = manifest_digest(entries)
    sources = tuple(part.address for part in parts if part.address and part.num_tensors)
    on_record = digest_of_before(before) if before else digest
    return PolicyWeights(version, digest, dtype, entries, own.bits, on_record, sources)


def _dtype_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Their dtype; empty without tensors."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(dtypes) > 1:
        raise ValueError(f"a policy has one inference dtype, not {sorted(dtypes)}")
    return next(iter(dtypes), "")


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is; at a tenth of the time of a digest, and without a copy."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))


class WeightUpdate:
    """A version for generators: a header and frames, which may be iterated several times.

    A frame is the bytes of a WeightFrame. Changes are packed in threads and written into frames once for all
    generators, while the first frames are sent already.

    Attributes:
        target: The version that it brings.
        base: The version that the receiver has; None if it needs every element.
        own_bytes: Size of the tensors that this rank owns.

    Args:
        base: The version that the receiver has; None if it needs every element.
        frame_bytes: Most bytes of weights in one run of elements; a frame of changes ends with the run that fills it.
    """

    def __init__(
        self, policy: PolicyWeights, base: PolicyWeights | None = None, frame_bytes: int = FRAME_BYTES
    ) -> None:
        self.target, self.base = policy.facts, base.facts if base else None
        self.own_bytes = sum(bits.nbytes for bits in policy.bits.values())
        self._policy = None if base else policy
        # Let go once the changes are packed.
        self._versions = (policy, base) if base else None
        self._frame_bytes = frame_bytes
        self._runs = [
            (name, slice(start, start + frame_bytes // bits.itemsize))
            for name, bits in policy.bits.items()
            for start in range(0, bits.size, frame_bytes // bits.itemsize)
        ]
        self._frames: list[bytes] = []
        self._packing: asyncio.Task[None] | None = None
        self._grown = asyncio.Event()

    @property
    def kind(self) -> UpdateKind:
        """Whether it has every element, or changes to its base."""
        return "changes" if self.base else "full"

    async def pack(self) -> int:
        """Pack all changes, and let both policies go: from now on only the frames are kept.

        Returns:
            The bytes of the frames; 0 for a version with every element, whose frames are made as they are sent.
        """
        await self._begin_packing()
        return sum(map(len, self._frames))

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._elements(self._policy) if self._policy else self._changes()

    async def _elements(self, policy: PolicyWeights) -> AsyncIterator[bytes]:
        for name, run in self._runs:
            # To copy so little takes less time than to hand it to a thread.
            yield _serialized([_whole(name, run, policy.bits[name].reshape(-1)[run])])

    async def _changes(self) -> AsyncIterator[bytes]:
        packing, number = self._begin_packing(), 0
        while number < len(self._frames) or not packing.done():
            if number == len(self._frames):
                self._grown.clear()
                await self._grown.wait()
                continue
            yield self._frames[number]
            number += 1
        packing.result()  # raises its failure

    def _begin_packing(self) -> asyncio.Task[None]:
        """The packing: the first that needs it begins it, and the end of a push does not end it."""
        if self._packing is None:
            self._packing = asyncio.create_task(self._pack())
            self._packing.add_done_callback(self._end_packing)
        return self._packing

    def _end_packing(self, packing: asyncio.Task[None]) -> None:
        self._grown.set()
        if not packing.cancelled():
            packing.exception()  # raised where the packing is awaited, if it is

    async def _pack(self) -> None:
        if self._versions is None:
            return
        runs, waiting = iter(self._runs), deque[asyncio.Task[TensorFrame | None]]()
        filled: list[TensorFrame] = []
        while True:
            for run in islice(runs, PACKING_THREADS - len(waiting)):
                waiting.append(asyncio.create_task(asyncio.to_thread(_packed_run, *self._versions, *run)))
            if not waiting:
                break
            packed = await waiting.popleft()
            filled += [packed] if packed else []
            if sum(len(tensor.data) + len(tensor.changes.packed) for tensor in filled) >= self._frame_bytes:
                self._add(filled)
        self._add(filled)
        self._versions = None

    def _add(self, filled: list[TensorFrame]) -> None:
        """Write a frame, and wake the pushes that wait for it."""
        if filled:
            self._frames.append(_serialized(filled))
            filled.clear()
            self._grown.set()


def push_header(target: PolicyFacts, base: PolicyFacts | None, *, run: str, epoch: int, learner: str) -> PushHeader:
    """The header of a push of a version, or of changes to a base, from a learner of this epoch of a run."""
    return PushHeader(
        run=run,
        epoch=epoch,
        learner=learner,
        version=target.version,
        digest=target.digest,
        base_digest=base.digest if base else "",
        base_version=base.version if base else None,
        dtype=target.dtype,
        num_tensors=target.num_tensors,
        num_bytes=target.num_bytes,
        sources=target.sources,
    )


def _packed_run(policy: PolicyWeights, base: PolicyWeights, name: str, run: slice) -> TensorFrame | None:
    """The changes in a run, or all of it if that is less; None without a change."""
    new = policy.bits[name].reshape(-1)[run]
    packed = pack_changes(new, base.bits[name].reshape(-1)[run])
    if not packed.num_listed:
        return None
    if len(packed.data) >= new.nbytes:
        return _whole(name, run, new)
    changes = Changes(num_listed=packed.num_listed, packed=packed.data)
    return TensorFrame(name=name, offset=run.start, num_elements=len(new), changes=changes)


def _whole(name: str, run: slice, elements: Bits) -> TensorFrame:
    return TensorFrame(name=name, offset=run.start, num_elements=len(elements), data=elements.tobytes())


def _serialized(tensors: list[TensorFrame]) -> bytes:
    return WeightFrame(tensors=tensors).SerializeToString()
