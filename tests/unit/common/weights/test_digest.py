"""The digest of a policy: its manifest by hand, and the digest of runs of before, against sha256sum."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from gspo.common.weights.fingerprint import fingerprint
from gspo.common.weights.manifest import (
    digest_of_before,
    entries_of,
    entries_of_before,
    is_of_before,
    manifest_digest,
    policy_digest,
)

A = ("a.weight", "float32", (2,), np.array([1.0, -2.0], np.float32))
B = ("b.weight", "bfloat16", (1, 1), np.array([[0x3F80]], np.uint16))  # 1.0 in bfloat16
# printf 'a.weight float32 2 HASH_A\nb.weight bfloat16 1,1 HASH_B\n' | sha256sum
# HASH_A: printf '\x00\x00\x80\x3f\x00\x00\x00\xc0' | sha256sum
# HASH_B: printf '\x80\x3f' | sha256sum
SHA_256 = "661b96bca85c0715fd7ae449cc4283a990f34ddc6b5f3269d6b1f382a63abb25"


def test_the_digest_is_that_of_the_sorted_lines_of_the_manifest() -> None:
    lines = f"a.weight float32 2 {fingerprint(A[3])}\nb.weight bfloat16 1,1 {fingerprint(B[3])}\n"
    expected = f"lin64:{hashlib.sha256(lines.encode()).hexdigest()}"
    assert policy_digest([A, B]) == policy_digest([B, A]) == expected
    assert str(fingerprint(A[3][:0])) == 32 * "0"


def test_a_digest_on_record_says_which_kind_it_is() -> None:
    assert [is_of_before(digest) for digest in (SHA_256, policy_digest([A, B]), "")] == [True, False, False]
    assert digest_of_before(entries_of_before([B, A])) == SHA_256
    assert manifest_digest([*entries_of([B]), *entries_of([A])]) == policy_digest([A, B])
    empty = ("a", "float32", (0, 3), np.zeros((0, 3), np.float32))
    assert digest_of_before(entries_of_before([empty])) != digest_of_before([])


@pytest.mark.parametrize(
    "other",
    [
        ("c.weight", *A[1:]),
        (A[0], "int32", *A[2:]),
        (*A[:2], (2, 1), A[3]),
        (*A[:3], np.array([1.0, 2.0], np.float32)),
    ],
)
def test_policy_digest_sees_name_dtype_shape_and_bits(other: tuple[str, str, tuple[int, ...], np.ndarray]) -> None:
    assert policy_digest([A]) != policy_digest([other])


def test_zero_and_minus_zero_differ() -> None:
    zeros = [("a", "float32", (1,), np.array([zero], np.float32)) for zero in (0.0, -0.0)]
    assert policy_digest(zeros[:1]) != policy_digest(zeros[1:])


def test_a_name_given_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a\.weight"):
        policy_digest([A, A])
