"""The changes from one version of a run of weights to another: lossless, and a percent or two of all bytes.

A small step of an optimizer moves few bfloat16 values, and those by one unit in the last place. Each changed element
is packed as the gap from the previous one (one byte) and the difference of the bits. The difference is an unsigned
number (zigzag: 0, -1, 1, -2 ... as 0, 1, 2, 3 ...). All gaps come first, then the differences byte plane by byte
plane, the whole compressed with zstd.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

# Higher levels take longer and save nothing here: gaps and differences are close to random.
_LEVEL = 1
_LONGEST_GAP = 255
Bits = NDArray[np.unsignedinteger[Any]]


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
