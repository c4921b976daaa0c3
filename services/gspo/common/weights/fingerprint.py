"""The fingerprint of a tensor: sums of its bits in two lanes, the same for any cut of it and on any device.

A tensor's bytes are little-endian 32-bit words x(w), the last one filled with zeros. Each lane is

    F = sum over w of k(w) * x(w)   mod 2**64,    k(w) = column(w mod 2048) * row(w div 2048)

with odd random numbers `column` and `row`. Integers have no rounding and no order, so the sums of parts add up to the
sum of the whole, and a change of some elements adds k * (new - old). One changed word is always seen. Other differences
of two tensors are missed with a chance of about 2**-33 a lane. It finds errors, not forgeries: the token of a cluster
and TLS keep others out.

This is the form for host memory. `device_fingerprint.py` has those for devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

NUM_COLUMNS: Final = 2048
WORD_BYTES: Final = 4
ROW_BYTES: Final = NUM_COLUMNS * WORD_BYTES
# Between the counters of the random numbers for columns and rows of each lane; a tensor has fewer rows.
SPACING: Final = 2**40
GOLDEN: Final = 0x9E3779B97F4A7C15
FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9
SECOND_FACTOR: Final = 0x94D049BB133111EB
_LANES, _MASK = 2, 2**64 - 1
# At a time: they stay in a core's cache.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The two lanes, each from 0 to 2**64 - 1. Fingerprints of disjoint parts of a tensor add up."""

    first: int = 0
    second: int = 0

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint((self.first + other.first) & _MASK, (self.second + other.second) & _MASK)

    def __sub__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint((self.first - other.first) & _MASK, (self.second - other.second) & _MASK)

    def __str__(self) -> str:
        return f"{self.first:016x}{self.second:016x}"


def fingerprint(bits: NDArray[Any], start: int = 0) -> Fingerprint:
    """The fingerprint of a run of a tensor's elements.

    Args:
        bits: C-contiguous, of any shape and of 1, 2 or 4 bytes an element.
        start: The first one's flat position in the tensor.

    Raises:
        ValueError: The elements are not contiguous, or of another width.
    """
    if not bits.flags.c_contiguous:
        raise ValueError("fingerprint: the elements are not contiguous")
    data, begin = bits.reshape(-1).view(np.uint8), start * check_width(bits.itemsize)
    end = begin + len(data)
    sums = np.zeros((_LANES, NUM_COLUMNS), np.uint64)
    for chunk in range(begin // ROW_BYTES, -(-end // ROW_BYTES), _ROWS):
        first, last = max(begin, chunk * ROW_BYTES), min(end, (chunk + _ROWS) * ROW_BYTES)
        rows = np.zeros((-(-last // ROW_BYTES) - chunk, NUM_COLUMNS), np.uint32)
        rows.reshape(-1).view(np.uint8)[first - chunk * ROW_BYTES : last - chunk * ROW_BYTES] = data[
            first - begin : last - begin
        ]
        # Sums of integers by einsum run at twice the rate of SHA-256, those by `@` at half of it.
        sums += np.einsum("lr,rc->lc", row_factors(chunk, len(rows)), rows.astype(np.uint64))
    return _folded(sums * COLUMN_FACTORS)


def fingerprint_change(positions: NDArray[np.int64], new: NDArray[Any], old: NDArray[Any]) -> Fingerprint:
    """The fingerprint of changes: added to that of the old tensor, it gives that of the new one.

    Args:
        positions: Flat positions in the tensor, ascending.
        new, old: Their elements as unsigned integers of the tensor's width.

    Raises:
        ValueError: The elements have another width.
    """
    in_word = WORD_BYTES // check_width(new.itemsize)
    if not len(positions):
        return Fingerprint()
    words = positions // in_word
    rows = words // NUM_COLUMNS
    shift = (8 * new.itemsize * (positions & (in_word - 1))).astype(np.uint64)
    difference = (new.astype(np.uint64) - old.astype(np.uint64)) << shift
    # A random number costs more than a sum: those of rows are made once a row.
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    sums = np.add.reduceat(COLUMN_FACTORS[:, words & (NUM_COLUMNS - 1)] * difference, begins, axis=1)
    return _folded(sums * _random(_ROW_COUNTERS + rows[begins].astype(np.uint64)))


def row_factors(first: int, number: int) -> NDArray[np.uint64]:
    """`row` of so many rows from `first` on, in both lanes: [2, number]."""
    return _random(_ROW_COUNTERS + np.arange(first, first + number, dtype=np.uint64))


def _random(counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Odd numbers: splitmix64 (Steele, Lea and Flood, 2014) of these counters."""
    mixed = (counters + np.uint64(1)) * np.uint64(GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


def _folded(lanes: NDArray[np.uint64]) -> Fingerprint:
    """The sum of each of two rows."""
    return Fingerprint(*(int(lane) for lane in lanes.sum(axis=1, dtype=np.uint64)))


def check_width(itemsize: int) -> int:
    """Bytes of an element.

    Raises:
        ValueError: A word does not consist of such elements.
    """
    if itemsize not in (1, 2, WORD_BYTES):
        raise ValueError(f"fingerprint: elements have 1, 2 or 4 bytes, not {itemsize}")
    return itemsize


_ROW_COUNTERS = np.array([[2], [3]], np.uint64) * np.uint64(SPACING)
# `column` in both lanes: [2, NUM_COLUMNS].
COLUMN_FACTORS = _random(np.array([[0], [1]], np.uint64) * np.uint64(SPACING) + np.arange(NUM_COLUMNS, dtype=np.uint64))
