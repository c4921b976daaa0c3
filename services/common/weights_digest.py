"""The digest of a policy: the name by which learner and generators agree that they hold the same weights.

What it is not: a digest of files; two folders with the same tensors in other files have the same digest.
Neighbours: the learner digests each version it publishes, a generator what it has staged, before it loads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

# Raw little-endian bytes in C order. A dtype that NumPy lacks (bfloat16) comes as an integer view of its width.
TensorBytes: TypeAlias = bytes | bytearray | memoryview | NDArray[np.generic]


def tensor_digest(data: TensorBytes) -> str:
    """SHA-256 of one tensor's raw bytes, in hex. `data` is C-contiguous; BufferError or ValueError otherwise."""
    view = memoryview(cast("bytes", data))  # before Python 3.12 types cannot say "a buffer"
    # A view with a zero in its shape cannot be cast.
    return hashlib.sha256(view.cast("B") if view.nbytes else b"").hexdigest()


def policy_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], TensorBytes]]) -> str:
    """SHA-256 over the sorted lines `name dtype shape tensor_digest` of a whole policy, in hex.

    Each tensor is (Hugging Face name, dtype as in `bfloat16`, shape, raw bytes). Their order does not matter; a
    tied `lm_head.weight` is left out by both sides, so that one policy has one digest. ValueError for a name that
    comes twice.
    """
    lines: dict[str, str] = {}
    for name, dtype, shape, data in tensors:
        if name in lines:
            raise ValueError(f"policy_digest: tensor {name!r} was given twice")
        lines[name] = f"{name} {dtype} {','.join(map(str, shape))} {tensor_digest(data)}\n"
    return hashlib.sha256("".join(lines[name] for name in sorted(lines)).encode()).hexdigest()
