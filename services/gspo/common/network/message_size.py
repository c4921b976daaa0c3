"""How many fields a protobuf message has on the wire, without reading it.

Bytes that are few can be objects that are many: a field of two bytes costs a hundred when it is read, and the reading
cannot be interrupted. Neighbour: grpc_guard.py asks before every message is read.
"""

from __future__ import annotations

from typing import Any

# A Score of 1024 full rollouts of conversations has fewer with four reward functions, and more with six: an outside
# caller then sends fewer rollouts at a time.
MAX_FIELDS = 50_000
_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)


class TooManyFieldsError(ValueError):
    """A message has more than MAX_FIELDS."""


def check_fields(descriptor: Any, data: bytes) -> None:
    """Refuse a message with more than MAX_FIELDS fields in it, at any depth. What is no protobuf passes.

    Args:
        descriptor: Of the message.

    Raises:
        TooManyFieldsError: It has more.
    """
    left = MAX_FIELDS
    # Parts of the message that are yet to be looked at: whose fields, from where to where.
    parts = [(descriptor, 0, len(data))]
    while parts:
        inner, at, end = parts.pop()
        while at < end:
            left -= 1
            if left < 0:
                raise TooManyFieldsError(f"a message has at most {MAX_FIELDS} fields, and this one has more")
            try:
                at = _next_field(data, at, inner, parts)
            except IndexError:  # cut short: whoever reads it says so
                break


def _next_field(data: bytes, at: int, descriptor: Any, parts: list[tuple[Any, int, int]]) -> int:
    """Where the field after the one at `at` begins; a message in it is added to `parts`.

    Raises:
        IndexError: It is cut short, or of no kind that there is.
    """
    tag, at = _varint(data, at)
    kind = tag & 7
    if kind == _VARINT:
        return _varint(data, at)[1]
    if kind in (_FIXED64, _FIXED32):
        return at + (8 if kind == _FIXED64 else 4)
    if kind in (_GROUP, _END_GROUP):  # what is in a group counts as if it were not
        return at
    if kind != _BYTES:
        raise IndexError(kind)
    length, at = _varint(data, at)
    field = descriptor.fields_by_number.get(tag >> 3)
    if field is not None and field.message_type is not None and length:
        parts.append((field.message_type, at, min(at + length, len(data))))
    return at + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError(at)
