"""The changes from one version of a run of weights to another: lossless, and some percent of all bytes.

A small step of an optimizer moves few bfloat16 values, and those by one unit in the last place. Each changed element
is packed as the gap from the previous one (one byte) and the difference of the bits. That is an unsigned number
(zigzag: 0, -1, 1, -2 ... as 0, 1, 2, 3 ...). All gaps come first, then differences byte plane by byte plane, then a
CRC-32 of the old bits, the whole compressed with zstd.

The receiver has the old bits, and other weights take no changes. Its fingerprint of the new version follows from the
changes alone.
"""

import zlib
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gspo.common.weights.fingerprint import Fingerprint, fingerprint, fingerprint_change

# Higher levels take longer and save nothing here: gaps and differences are close to random.
_LEVEL = 1
_LONGEST_GAP = 255
_CHECKSUM_BYTES = 4
# If one of so many elements changes, two sums over all of them take less time than one over the changes.
_MANY = 16
Bits = NDArray[np.unsignedinteger[Any]]


class Packed(NamedTuple):
    """Changes to a run of elements: the number of listed ones, and the packed bytes."""

    num_listed: int
    data: bytes


class UnpackError(ValueError):
    """The packed bytes are not changes to this run of elements."""


def pack_changes(new: Bits, old: Bits) -> Packed:
    """The changes from `old` to `new`: flat, of equal length and of 2 or 4 bytes an element."""
    listed, gaps = _with_fillers(np.flatnonzero(new != old))
    before = old[listed]
    plain = np.concatenate([gaps, _planes(_zigzag(new[listed] - before)), _checksum(before)])
    return Packed(len(listed), pa.Codec("zstd", _LEVEL).compress(plain, asbytes=True))


def apply_changes(bits: Bits, packed: Packed, start: int = 0) -> Fingerprint:
    """Change a run of elements, in place.

    Args:
        start: Flat position of the run in its tensor.

    Returns:
        The fingerprint of the changes, which leads from that of the old tensor to that of the new one.

    Raises:
        UnpackError: Nothing was changed.
    """
    if packed.num_listed > len(bits):
        raise UnpackError(f"{packed.num_listed} changes to {len(bits)} elements")
    try:
        size = packed.num_listed * (1 + bits.itemsize) + _CHECKSUM_BYTES
        plain = np.frombuffer(pa.Codec("zstd").decompress(packed.data, size), np.uint8)
    except OSError as error:
        raise UnpackError(f"the changes do not unpack: {error}") from error
    gaps, differences, checksum = np.split(plain, [packed.num_listed, size - _CHECKSUM_BYTES])
    listed = np.cumsum(gaps, dtype=np.int64) - 1
    if len(listed) and not 0 <= listed[0] <= listed[-1] < len(bits):
        raise UnpackError(f"the changes reach to element {listed[-1]} of {len(bits)}")
    old = bits[listed]
    if not np.array_equal(checksum, _checksum(old)):
        raise UnpackError("the changes are to other weights")
    new = old + _undo_zigzag(_of_planes(differences, bits.dtype))
    if len(listed) < len(bits) // _MANY:
        bits[listed] = new
        return fingerprint_change(start + listed, new, old)
    before = fingerprint(bits, start)
    bits[listed] = new
    return fingerprint(bits, start) - before


def _checksum(elements: Bits) -> NDArray[np.uint8]:
    return np.frombuffer(zlib.crc32(elements.data).to_bytes(_CHECKSUM_BYTES, "little"), np.uint8)


def _planes(elements: Bits) -> NDArray[np.uint8]:
    """Their lowest bytes, then the next ones."""
    return elements.view(np.uint8).reshape(len(elements), elements.itemsize).T.reshape(-1)


def _of_planes(planes: NDArray[np.uint8], dtype: np.dtype[Any]) -> Bits:
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)


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
