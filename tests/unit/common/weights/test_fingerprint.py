"""Fingerprints of tensors: the sum by hand, any cut, changes alone, and the differences that must be seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.common.weights.fingerprint import Fingerprint, fingerprint, fingerprint_change

# The first number of splitmix64 after seed 0, as published with it; it is odd, and the first column of the first lane.
FIRST = 0xE220A8397B1DCDAF
WIDTHS = (np.uint8, np.uint16, np.uint32)


def elements(width: type[np.unsignedinteger], size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(width).max, size, width, endpoint=True)


def splitmix64(counter: int) -> int:
    mixed = (counter + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def lane(words: dict[int, int], number: int) -> int:
    """A lane of a tensor whose other words are zero, by the formula."""

    def factor(word: int) -> int:
        row, column = divmod(word, 2048)
        return (splitmix64(number * 2**40 + column) | 1) * (splitmix64((2 + number) * 2**40 + row) | 1)

    return sum(factor(word) * value for word, value in words.items()) % 2**64


def test_the_random_numbers_are_those_of_splitmix64() -> None:
    assert splitmix64(0) == FIRST


def test_a_lane_is_the_sum_of_words_times_column_times_row() -> None:
    words = {0: 1, 2047: 2**32 - 1, 2048: 7, 70 * 2048 + 5: 9}
    bits = np.zeros(71 * 2048, np.uint32)
    for word, value in words.items():
        bits[word] = value
    assert fingerprint(bits) == Fingerprint(lane(words, 0), lane(words, 1))
    assert fingerprint(bits[:1]).first == FIRST * (splitmix64(2**41) | 1) % 2**64


@pytest.mark.parametrize("width", WIDTHS)
def test_the_bytes_are_words_whatever_the_elements_width(width: type[np.unsignedinteger]) -> None:
    bits = elements(np.uint32, 5000)
    assert fingerprint(bits.view(width)) == fingerprint(bits) == fingerprint(bits.reshape(50, 100))
    assert fingerprint(elements(width, 4)[:0]) == Fingerprint()


@given(st.sampled_from(WIDTHS), st.integers(0, 20_000), st.lists(st.integers(0, 20_000), max_size=4))
def test_the_parts_of_any_cut_add_up(width: type[np.unsignedinteger], size: int, cuts: list[int]) -> None:
    bits = elements(width, size)
    ends = [*sorted(min(cut, size) for cut in cuts), size]
    parts = [fingerprint(bits[start:end], start) for start, end in zip([0, *ends], ends, strict=False)]
    assert sum(parts, Fingerprint()) == fingerprint(bits)


@given(st.sampled_from(WIDTHS), st.integers(1, 9000), st.sets(st.integers(0, 8999), max_size=30))
def test_the_new_fingerprint_follows_from_the_changes(
    width: type[np.unsignedinteger], size: int, changed: set[int]
) -> None:
    old = elements(width, size)
    new = old.copy()
    positions = np.array(sorted(place for place in changed if place < size), np.int64)
    new[positions] = elements(width, len(positions), seed=1)
    change = fingerprint_change(positions, new[positions], old[positions])
    assert fingerprint(old) + change == fingerprint(new)
    assert fingerprint(new) - change == fingerprint(old)


def test_what_a_sum_alone_would_miss_is_seen() -> None:
    bits = elements(np.uint16, 3 * 4096)
    swapped, moved, rows, flipped = (bits.copy() for _ in range(4))
    swapped[[7, 900]] = bits[[900, 7]]
    moved[1:] = bits[:-1]
    rows[:4096], rows[4096:8192] = bits[4096:8192], bits[:4096]
    flipped[[11, 12]] ^= 0x8000  # two signs, of which the upper bits of the product are lost
    seen = [fingerprint(other) for other in (swapped, moved, rows, flipped)]
    assert all(other.first != fingerprint(bits).first and other.second != fingerprint(bits).second for other in seen)


def test_zeros_behind_a_tensor_are_not_seen_so_that_the_manifest_has_its_shape() -> None:
    assert fingerprint(np.array([5, 0], np.uint16)) == fingerprint(np.array([5], np.uint16))


def test_what_is_no_row_of_words_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        fingerprint(elements(np.uint16, 10)[::2])
    with pytest.raises(ValueError, match="1, 2 or 4 bytes, not 8"):
        fingerprint(np.zeros(3))
    with pytest.raises(ValueError, match="1, 2 or 4 bytes, not 8"):
        fingerprint_change(np.arange(3), np.zeros(3, np.uint64), np.zeros(3, np.uint64))
