"""A weight update as both of its sides see it: the digest of a policy, the packed changes, and the time limit.

The digest is of tensors: two folders with the same tensors in different files have the same digest. The changes from
one version of a run of weights to another are lossless, and a percent or two of all bytes.

A small step of an optimizer moves few bfloat16 values, and those by one unit in the last place. Each changed element
is packed as the gap from the previous one (one byte) and the difference of the bits. The difference is an unsigned
number (zigzag: 0, -1, 1, -2 ... as 0, 1, 2, 3 ...). All gaps come first, then the differences byte plane by byte
plane, the whole compressed with zstd.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

# SHA-256 runs at 1.6 GiB/s a core where the processor has instructions for it, faster than BLAKE2 or SHA-3, and lets
# other threads run. More threads than these would only wait for memory.
_MOST_THREADS = 8
# Raw little-endian bytes in C order. A dtype that NumPy lacks (bfloat16) comes as an integer view of its width.
TensorBytes: TypeAlias = bytes | bytearray | memoryview | NDArray[np.generic]
# Higher levels take longer and save nothing here: gaps and differences are close to random.
_LEVEL = 1
_LONGEST_GAP = 255
Bits = NDArray[np.unsignedinteger[Any]]
# Other work on the same machines and networks may slow the next one down so far.
_MARGIN = 4.0
# A rate of long ago says little of today's network and load.
_NUM_REMEMBERED = 8


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


class Packed(NamedTuple):
    """Changes to a run of elements: the number of listed ones, and their gaps and differences."""

    num_listed: int
    data: bytes


class UnpackError(ValueError):
    """The packed bytes are not changes to a run of this length and width."""


def pack_changes(new: Bits, old: Bits) -> Packed:
    """The changes from `old` to `new`: flat, of equal length and of 2 or 4 bytes an element."""
    listed, gaps = _with_fillers(np.flatnonzero(new != old))
    planes = _zigzag(new[listed] - old[listed]).view(np.uint8).reshape(len(listed), new.itemsize).T
    plain = np.concatenate([gaps, planes.reshape(-1)])
    return Packed(len(listed), pa.Codec("zstd", _LEVEL).compress(plain, asbytes=True))


def apply_changes(bits: Bits, packed: Packed) -> None:
    """Change a run of elements, in place.

    Raises:
        UnpackError: Nothing was changed.
    """
    if packed.num_listed > len(bits):
        raise UnpackError(f"{packed.num_listed} changes to {len(bits)} elements")
    try:
        size = packed.num_listed * (1 + bits.itemsize)
        plain = np.frombuffer(pa.Codec("zstd").decompress(packed.data, size), np.uint8)
    except OSError as error:
        raise UnpackError(f"the changes do not unpack: {error}") from error
    listed = np.cumsum(plain[: packed.num_listed], dtype=np.int64) - 1
    if len(listed) and not 0 <= listed[0] <= listed[-1] < len(bits):
        raise UnpackError(f"the changes reach to element {listed[-1]} of {len(bits)}")
    planes = plain[packed.num_listed :].reshape(bits.itemsize, packed.num_listed)
    bits[listed] += _undo_zigzag(np.ascontiguousarray(planes.T).view(bits.dtype).reshape(-1))


def _with_fillers(changed: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Positions to list and the gap before each; unchanged positions divide a gap that is too long for a byte."""
    gaps = np.diff(changed, prepend=-1)
    num_fillers = (gaps - 1) // _LONGEST_GAP
    if not num_fillers.any():
        return changed, gaps.astype(np.uint8)
    num_each = num_fillers + 1
    ends = np.cumsum(num_each)
    within = np.arange(ends[-1]) - np.repeat(ends - num_each, num_each)
    listed = np.repeat(changed - gaps, num_each) + (within + 1) * _LONGEST_GAP
    listed[ends - 1] = changed
    return listed, np.diff(listed, prepend=-1).astype(np.uint8)


def _zigzag(difference: Bits) -> Bits:
    signed = difference.view(f"i{difference.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)


def _undo_zigzag(coded: Bits) -> Bits:
    unit = coded.dtype.type(1)
    return (coded >> unit) ^ (~(coded & unit) + unit)


class TimeLimit:
    """Seconds allowed for bytes: a multiple of the time at the slowest of the last rates, and never below a least time.

    A fixed number of seconds is too short for a large policy and too long for a small one.

    Args:
        least_s: The limit is never below it.
        first_bytes_s: Bytes a second that are assumed at first. Choose a rate below the expected one.
    """

    def __init__(self, least_s: float, first_bytes_s: float) -> None:
        self._least_s = least_s
        self._bytes_s = deque([first_bytes_s], maxlen=_NUM_REMEMBERED)

    def seconds(self, num_bytes: int) -> float:
        """The limit for work on `num_bytes`."""
        return max(self._least_s, _MARGIN * num_bytes / min(self._bytes_s))

    def record(self, num_bytes: int, seconds: float) -> None:
        """Record that work on `num_bytes` succeeded in `seconds`."""
        if num_bytes and seconds > 0:
            self._bytes_s.append(num_bytes / seconds)
