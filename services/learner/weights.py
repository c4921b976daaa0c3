"""A published policy as raw bits, and the frames of a push: all elements, or those that changed.

Bits are compared, not numbers, so a delta loses nothing. Neighbours: trainer.py gives the tensors, publisher.py sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo_proto.generation_pb2 import PushHeader, TensorFrame, WeightFrame
from services.common.weights_digest import policy_digest

# Well below gRPC's limit for a message, and large enough that its cost per message does not count.
_FRAME_BYTES = 8 * 2**20
_INDEX_BYTES = 8
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True)
class Policy:
    """One version of the policy in the inference dtype, in host memory.

    Attributes:
        bits: Tensor name -> its elements as integers of the same width, in their shape.
    """

    version: int
    digest: str
    dtype: str
    bits: Mapping[str, NDArray[np.signedinteger[Any]]]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.bits.values())


def policy_from(version: int, tensors: Mapping[str, torch.Tensor]) -> Policy:
    """A policy from contiguous CPU tensors of one dtype, which must not change afterwards."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    if len(dtypes) != 1:
        raise ValueError(f"a policy has one inference dtype, not {sorted(dtypes)}")
    (dtype,) = dtypes
    bits = {name: tensor.view(_BITS[tensor.dtype]).numpy() for name, tensor in tensors.items()}
    digest = policy_digest((name, dtype, tensor.shape, tensor) for name, tensor in bits.items())
    return Policy(version, digest, dtype, bits)


async def push_frames(policy: Policy, base: Policy | None, *, run: str, epoch: int) -> AsyncIterator[WeightFrame]:
    """The frames of one push: a header, then every tensor, or what changed since `base`."""
    yield WeightFrame(
        header=PushHeader(
            run=run,
            epoch=epoch,
            version=policy.version,
            digest=policy.digest,
            base_digest=base.digest if base else "",
            dtype=policy.dtype,
            num_tensors=len(policy.bits),
            num_bytes=policy.num_bytes,
        )
    )
    for name, bits in policy.bits.items():
        before = base.bits[name] if base else None
        frames = await asyncio.to_thread(lambda *args: list(_tensor_frames(*args)), name, bits, before)
        for frame in frames:
            yield WeightFrame(tensor=frame)


def _tensor_frames(
    name: str, bits: NDArray[np.signedinteger[Any]], before: NDArray[np.signedinteger[Any]] | None
) -> Iterator[TensorFrame]:
    flat = bits.reshape(-1)
    if before is not None:
        changed = np.flatnonzero(flat != before.reshape(-1))
        if len(changed) * (_INDEX_BYTES + flat.itemsize) < flat.nbytes:
            yield from _changed_frames(name, bits.shape, flat, changed)
            return
    step = _FRAME_BYTES // flat.itemsize
    for start in range(0, len(flat), step):
        yield TensorFrame(name=name, shape=bits.shape, offset=start, data=flat[start : start + step].tobytes())


def _changed_frames(
    name: str, shape: tuple[int, ...], flat: NDArray[np.signedinteger[Any]], changed: NDArray[np.signedinteger[Any]]
) -> Iterator[TensorFrame]:
    step = _FRAME_BYTES // (_INDEX_BYTES + flat.itemsize)
    for start in range(0, len(changed), step):
        at = changed[start : start + step].astype("<u8")
        yield TensorFrame(name=name, shape=shape, data=flat[at].tobytes(), indices=at.tobytes())
