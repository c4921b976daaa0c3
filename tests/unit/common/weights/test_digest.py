"""The digest of a policy, against hashes made with sha256sum."""

from __future__ import annotations

import numpy as np
import pytest

from gspo.common.weights.manifest import policy_digest, tensor_digest

A = ("a.weight", "float32", (2,), np.array([1.0, -2.0], np.float32))
B = ("b.weight", "bfloat16", (1, 1), np.array([[0x3F80]], np.uint16))  # 1.0 in bfloat16


def test_tensor_digest_is_that_of_its_little_endian_bytes() -> None:
    # printf '\x00\x00\x80\x3f\x00\x00\x00\xc0' | sha256sum
    assert tensor_digest(A[3]) == "ee4ac73c2bd27756ab82780f27c73a7bc4d3f0bb6acb37e008bc27eccd7e588b"
    # printf '\x80\x3f' | sha256sum
    assert (
        tensor_digest(B[3])
        == tensor_digest(b"\x80\x3f")
        == "b9c205bdac187f20bf876cea369cb6032ad1bf69043b31d716b36b8defbffdf2"
    )
    # printf '' | sha256sum
    assert (
        tensor_digest(np.zeros((0, 3), np.float32))
        == tensor_digest(b"")
        == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )


def test_policy_digest_is_that_of_the_sorted_lines() -> None:
    # printf 'a.weight float32 2 HASH_A\nb.weight bfloat16 1,1 HASH_B\n' | sha256sum
    assert (
        policy_digest([A, B])
        == policy_digest([B, A])
        == "661b96bca85c0715fd7ae449cc4283a990f34ddc6b5f3269d6b1f382a63abb25"
    )


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
    assert tensor_digest(np.array([0.0], np.float32)) != tensor_digest(np.array([-0.0], np.float32))


def test_a_name_given_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a\.weight"):
        policy_digest([A, A])
