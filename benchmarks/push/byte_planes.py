"""The encoding that gspo.common.weights.changes was chosen over: all elements' XOR in byte planes, with zstd.

What did not change becomes zero and compresses well, but every byte passes through the compressor.
Neighbour: push_packing.py holds both against each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger[Any]]


def pack_planes(new: Bits, old: Bits) -> list[bytes]:
    """The byte planes of two versions' XOR, the least significant first, each compressed."""
    planes = (new ^ old).view(np.uint8).reshape(len(new), new.itemsize).T
    codec = pa.Codec("zstd", 1)
    return [codec.compress(np.ascontiguousarray(plane), asbytes=True) for plane in planes]


def apply_planes(bits: Bits, packed: list[bytes]) -> None:
    """Change a run of elements, in place."""
    codec = pa.Codec("zstd")
    planes = [np.frombuffer(codec.decompress(plane, len(bits)), np.uint8) for plane in packed]
    bits ^= np.stack(planes, axis=1).view(bits.dtype).reshape(-1)
