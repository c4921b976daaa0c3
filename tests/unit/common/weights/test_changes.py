"""Packed changes: the format by hand, any pair of versions gives the newer one back, and broken bytes are refused."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gspo.common.weights.changes import Packed, UnpackError, apply_changes, pack_changes
from gspo.common.weights.fingerprint import fingerprint


def pair(dtype: type[np.unsignedinteger]) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    """Two versions of a run of elements, with stretches in which nothing changes."""
    top = int(np.iinfo(dtype).max)
    values = st.integers(0, top)
    few_changes = st.tuples(
        arrays(dtype, st.integers(0, 1200), elements=values, fill=st.just(7)),
        st.dictionaries(st.integers(0, 1199), values, max_size=8),
    ).map(_changed)
    all_change = st.integers(0, 40).flatmap(
        lambda size: st.tuples(arrays(dtype, size, elements=values), arrays(dtype, size, elements=values))
    )
    return few_changes | all_change


def _changed(given: tuple[np.ndarray, dict[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    old, changes = given
    new = old.copy()
    for place, value in changes.items():
        if place < len(new):
            new[place] = value
    return old, new


@given(st.one_of(pair(np.uint16), pair(np.uint32)))
def test_changes_to_the_old_version_give_the_new_one(versions: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = versions
    bits = old.copy()
    added = apply_changes(bits, pack_changes(new, old))
    assert bits.tolist() == new.tolist()
    assert fingerprint(old) + added == fingerprint(new)


def test_gaps_come_first_then_the_low_bytes_of_zigzag_differences_then_the_high_ones_then_a_checksum() -> None:
    old = np.zeros(300, np.uint16)
    old[2] = 0x0105
    new = old.copy()
    # Up one, down one, and up 300: as zigzag 2, 1 and 600 = 2 * 256 + 88.
    new[[2, 3, 299]] = [0x0106, 0xFFFF, 300]
    packed = pack_changes(new, old)
    # From element 3 to 299 is further than a byte says: the unchanged element 258 is listed between them.
    assert packed.num_listed == 4
    plain = list(pa.Codec("zstd").decompress(packed.data, 16, asbytes=True))
    assert (plain[:4], plain[4:8], plain[8:12]) == ([3, 1, 255, 41], [2, 1, 0, 88], [0, 0, 0, 2])
    assert plain[12:] == list(zlib.crc32(bytes([0x05, 0x01, 0, 0, 0, 0, 0, 0])).to_bytes(4, "little"))


def test_changes_to_other_weights_are_refused_and_the_fingerprint_is_of_the_place_in_the_tensor() -> None:
    old = np.arange(100, dtype=np.uint16)
    new = old.copy()
    new[[3, 90]] = 7
    packed, bits = pack_changes(new, old), old.copy()
    bits[90] ^= 1
    with pytest.raises(UnpackError, match="other weights"):
        apply_changes(bits, packed)
    assert bits[3] == 3, "nothing is changed"
    whole = np.concatenate([old, old])
    added = apply_changes(whole[100:], packed, start=100)
    assert fingerprint(np.concatenate([old, old])) + added == fingerprint(whole)


def test_no_change_is_nothing() -> None:
    bits = np.arange(1000, dtype=np.uint16)
    assert pack_changes(bits, bits).num_listed == 0


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda packed: Packed(packed.num_listed, packed.data[:-1]), "unpack"),
        (lambda packed: Packed(packed.num_listed, b"random bytes"), "unpack"),
        (lambda packed: Packed(packed.num_listed - 1, packed.data), "unpack"),
        (lambda packed: Packed(packed.num_listed + 1, packed.data), "unpack"),
        (lambda packed: Packed(10**9, packed.data), "1000000000 changes to 100 elements"),
    ],
)
def test_what_is_broken_is_refused_and_changes_nothing(broken: Callable[[Packed], Packed], why: str) -> None:
    old = np.arange(100, dtype=np.uint16)
    bits = old.copy()
    with pytest.raises(UnpackError, match=why):
        apply_changes(bits, broken(pack_changes(old * 3 % 50, old)))
    assert bits.tolist() == old.tolist()


def test_a_flipped_bit_of_changes_is_refused_or_seen_by_the_fingerprint() -> None:
    old = np.arange(400, dtype=np.uint16)
    new = old.copy()
    new[[3, 17, 90, 399]] = [0, 40000, 91, 7]
    packed, num_seen = pack_changes(new, old), 0
    for place in range(8 * len(packed.data)):
        broken, bits = bytearray(packed.data), old.copy()
        broken[place // 8] ^= 1 << place % 8
        try:
            added = apply_changes(bits, Packed(packed.num_listed, bytes(broken)))
        except UnpackError:
            assert bits.tolist() == old.tolist()
            continue
        num_seen += bits.tolist() != new.tolist()
        assert (fingerprint(old) + added == fingerprint(new)) is (bits.tolist() == new.tolist()), place
    assert num_seen > 10, "the fingerprint was not asked"


def test_changes_of_a_longer_run_are_refused() -> None:
    old = np.zeros(100, np.uint16)
    new = old.copy()
    new[99] = 1
    bits = np.zeros(99, np.uint16)
    with pytest.raises(UnpackError, match="element 99 of 99"):
        apply_changes(bits, pack_changes(new, old))
    assert not bits.any()
