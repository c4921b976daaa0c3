"""A policy version as raw bits, and the update that brings it to a generator: every element, or changes.

A push compares and sends bits, so that no number changes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.common.weights.changes import Bits, pack_changes
from gspo.common.weights.manifest import PREFIX, NamedTensor, digest_of_kind, policy_digest
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
    """

    version: int
    digest: str
    dtype: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class PolicyWeights:
    """One version of the policy in the inference dtype, in host memory.

    Attributes:
        bits: Tensor name -> its elements as unsigned integers of the same width, in their shape.
    """

    version: int
    digest: str
    dtype: str
    bits: Mapping[str, NDArray[np.unsignedinteger[Any]]]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in self.bits.values())

    def digest_like(self, recorded: str) -> str:
        """Its digest, of the kind of a digest on record: runs of before have another kind. Empty is this one's."""
        if not recorded or recorded.startswith(PREFIX):
            return self.digest
        return digest_of_kind(recorded, _named(self.dtype, self.bits))

    @property
    def facts(self) -> PolicyFacts:
        """The version without its weights."""
        return PolicyFacts(self.version, self.digest, self.dtype, len(self.bits), self.num_bytes)


def weights_from(version: int, tensors: Mapping[str, torch.Tensor]) -> PolicyWeights:
    """A policy from contiguous CPU tensors of one dtype, which must not change afterwards.

    Raises:
        NotFiniteError: A weight is infinite or NaN: no generator may sample from such a version.
    """
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(dtypes) != 1:
        raise ValueError(f"a policy has one inference dtype, not {sorted(dtypes)}")
    (dtype,) = dtypes
    if not_finite := [name for name, tensor in tensors.items() if not _is_finite(tensor)]:
        raise NotFiniteError(
            f"version {version} is not published: {len(not_finite)} of {len(tensors)} of its tensors hold weights that "
            f"are no finite numbers, first {not_finite[0]}"
            + (". Lower learner.learning_rate and resume" if version else "")
        )
    bits = {name: tensor.view(_BITS[tensor.dtype]).numpy() for name, tensor in tensors.items()}
    return PolicyWeights(version, policy_digest(_named(dtype, bits)), dtype, bits)


def _named(dtype: str, bits: Mapping[str, NDArray[np.unsignedinteger[Any]]]) -> Iterator[NamedTensor]:
    return ((name, dtype, tensor.shape, tensor) for name, tensor in bits.items())


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is; at a tenth of the time of a digest, and without a copy."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))


class WeightUpdate:
    """A version for generators: a header and frames, which may be iterated several times.

    A frame is the bytes of a WeightFrame. Changes are packed in threads and written into frames once for all
    generators, while the first frames are sent already.

    Attributes:
        target: The version that it brings.
        base_digest: That of the version that the receiver has; empty if it needs every element.

    Args:
        base: The version that the receiver has; None if it needs every element.
        frame_bytes: Most bytes of weights in one run of elements; a frame of changes ends with the run that fills it.
    """

    def __init__(
        self, policy: PolicyWeights, base: PolicyWeights | None = None, frame_bytes: int = FRAME_BYTES
    ) -> None:
        self.target, self.base_digest = policy.facts, base.digest if base else ""
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
        return "changes" if self.base_digest else "full"

    def header(self, run: str, epoch: int, learner: str) -> PushHeader:
        """Its header, from a learner of this epoch of a run."""
        return PushHeader(
            run=run,
            epoch=epoch,
            learner=learner,
            version=self.target.version,
            digest=self.target.digest,
            base_digest=self.base_digest,
            dtype=self.target.dtype,
            num_tensors=self.target.num_tensors,
            num_bytes=self.target.num_bytes,
        )

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
