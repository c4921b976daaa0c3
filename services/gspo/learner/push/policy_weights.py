"""A policy version as raw bits, and the update that brings it to a generator: every element, or changes.

A push compares and sends bits, so that no number changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.common.weights import Bits, pack_changes, policy_digest
from gspo.learner.training.trainer_api import NotFiniteError
from gspo_proto.generation_pb2 import PushHeader, WeightFrame

UpdateKind = Literal["full", "changes"]
# Far below gRPC's limit for a message. Larger ones are slower (4 MiB: a third of the rate): each copy of one is memory
# that the allocator takes from the system anew.
FRAME_BYTES = 2**20
# Frames that are packed before they are asked for, each in a thread.
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
    digest = policy_digest((name, dtype, tensor.shape, tensor) for name, tensor in bits.items())
    return PolicyWeights(version, digest, dtype, bits)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is; at a tenth of the time of a digest, and without a copy."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))


class WeightUpdate:
    """A version for generators: a header and frames, which may be iterated several times.

    Changes are packed in threads while earlier frames are sent, and kept, so that several generators cost one packing.

    Attributes:
        target: The version that it brings.
        base_digest: That of the version that the receiver has; empty if it needs every element.

    Args:
        base: The version that the receiver has; None if it needs every element.
        frame_bytes: Most bytes of weights in one frame.
    """

    def __init__(
        self, policy: PolicyWeights, base: PolicyWeights | None = None, frame_bytes: int = FRAME_BYTES
    ) -> None:
        self.target, self.base_digest = policy.facts, base.digest if base else ""
        # Changes let both go once they are packed.
        self._policy: PolicyWeights | None = policy
        self._base = base
        self._runs = [
            (name, slice(start, start + frame_bytes // bits.itemsize))
            for name, bits in policy.bits.items()
            for start in range(0, bits.size, frame_bytes // bits.itemsize)
        ]
        self._packed: dict[int, asyncio.Future[WeightFrame | None]] = {}

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
        """Pack all changes, and let both policies go: from now on only the packed frames are kept.

        Returns:
            The bytes of the frames.
        """
        num_bytes = sum([frame.ByteSize() async for frame in self._changes()])
        self._policy = self._base = None
        return num_bytes

    def __aiter__(self) -> AsyncIterator[WeightFrame]:
        if self.base_digest or self._policy is None:
            return self._changes()
        return self._elements(self._policy)

    async def _elements(self, policy: PolicyWeights) -> AsyncIterator[WeightFrame]:
        for name, run in self._runs:
            # To copy so little takes less time than to hand it to a thread.
            yield _whole(name, run, policy.bits[name].reshape(-1)[run])

    async def _changes(self) -> AsyncIterator[WeightFrame]:
        for number in range(len(self._runs)):
            for ahead in range(number, min(number + PACKING_THREADS, len(self._runs))):
                if ahead not in self._packed and self._policy and self._base:
                    packing = asyncio.to_thread(_packed_run, self._policy, self._base, *self._runs[ahead])
                    self._packed[ahead] = asyncio.ensure_future(packing)
                    self._packed[ahead].add_done_callback(_ignore_result)
            # Another push may wait for the same frame when this one is cancelled.
            frame = await asyncio.shield(self._packed[number])
            if frame is not None:
                yield frame


def _packed_run(policy: PolicyWeights, base: PolicyWeights, name: str, run: slice) -> WeightFrame | None:
    """The changes in a run, or all of it if that is less; None without a change."""
    new = policy.bits[name].reshape(-1)[run]
    packed = pack_changes(new, base.bits[name].reshape(-1)[run])
    if not packed.num_listed:
        return None
    if len(packed.data) >= new.nbytes:
        return _whole(name, run, new)
    frame = _frame(name, run, new)
    frame.tensor.changes.num_listed, frame.tensor.changes.packed = packed
    return frame


def _ignore_result(packed: asyncio.Future[WeightFrame | None]) -> None:
    """A failure is raised where its frame is awaited; frames ahead of it may never be awaited."""
    if not packed.cancelled():
        packed.exception()


def _whole(name: str, run: slice, elements: Bits) -> WeightFrame:
    frame = _frame(name, run, elements)
    frame.tensor.data = elements.tobytes()
    return frame


def _frame(name: str, run: slice, elements: Bits) -> WeightFrame:
    """A frame without its elements: they are put into it in place, because a message put into another is copied."""
    frame = WeightFrame()
    frame.tensor.name, frame.tensor.offset, frame.tensor.num_elements = name, run.start, len(elements)
    return frame
