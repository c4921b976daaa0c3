"""The digest of a policy version.

It is of tensors: two folders with the same tensors in different files have the same digest.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

# SHA-256 runs at 1.6 GiB/s a core where the processor has instructions for it, faster than BLAKE2 or SHA-3, and lets
# other threads run. More threads than these would only wait for memory.
_MOST_THREADS = 8
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
    tied `lm_head.weight` is omitted by both sides, so that one policy has one digest.

    Raises:
        ValueError: A name comes twice.
    """
    policy = list(tensors)
    (name, times), *_ = Counter(name for name, *_ in policy).most_common(1) or [("", 0)]
    if times > 1:
        raise ValueError(f"policy_digest: tensor {name!r} comes twice")
    # The largest first, so that no thread begins the longest tensor when the others are done.
    policy.sort(key=lambda tensor: -memoryview(cast("bytes", tensor[3])).nbytes)
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        digests = list(threads.map(tensor_digest, (data for *_, data in policy)))
    lines = sorted(
        (name, f"{name} {dtype} {','.join(map(str, shape))} {digest}\n")
        for (name, dtype, shape, _), digest in zip(policy, digests, strict=True)
    )
    return hashlib.sha256("".join(line for _, line in lines).encode()).hexdigest()
