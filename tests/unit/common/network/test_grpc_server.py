"""Fields of a message are counted before it is read: no bytes make it expensive."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.common.network.grpc_server import MAX_FIELDS, TooManyFieldsError, check_fields
from gspo_proto.reward_pb2 import ScoreRequest
from tests.support.reward_rollouts import make_rollout


def delimited(number: int, payload: bytes) -> bytes:
    """A field of bytes or of a message."""
    length, left = b"", len(payload)
    while left > 0x7F:
        length, left = length + bytes([left & 0x7F | 0x80]), left >> 7
    return bytes([number << 3 | 2]) + length + bytes([left]) + payload


def test_what_a_batch_needs_passes() -> None:
    rollout = make_rollout("4" * 10_000, answer="4")
    rollout.token_ids.extend(range(5000))
    rollout.rewards.add(name="exact", part_weights={str(number): 1.0 for number in range(10)})
    check_fields(ScoreRequest.DESCRIPTOR, ScoreRequest(rollouts=[rollout] * 1024).SerializeToString())


@pytest.mark.parametrize(
    "data",
    [
        delimited(1, b"\x08\x01") * MAX_FIELDS,
        delimited(1, delimited(5, b"") * 2 * MAX_FIELDS),
        delimited(1, delimited(4, b"") * 2 * MAX_FIELDS) + b"\x0a\x7f",  # its end is cut off
        b"\x0b" + delimited(1, b"\x08\x01") * MAX_FIELDS,  # begins with a group
        b"\x50\x01" * 2 * MAX_FIELDS,  # unknown to the message
    ],
    ids=["rollouts", "in one", "cut off", "group", "unknown"],
)
def test_fields_without_number_are_refused(data: bytes) -> None:
    began = time.process_time()
    with pytest.raises(TooManyFieldsError):
        check_fields(ScoreRequest.DESCRIPTOR, data)
    assert time.process_time() - began < 2.0  # 0.1 alone, 0.7 where others share the core


@given(st.binary(max_size=200))
def test_any_bytes_can_be_counted(data: bytes) -> None:
    check_fields(ScoreRequest.DESCRIPTOR, data)
