"""Frames between the service and a worker: a length, a format, and a value of JSON's kinds.

msgpack carries them, which also keeps NaN; what it cannot carry (half a surrogate pair, an integer of more than 64
bits) goes as JSON. Both ends use this module. Never pickle: user code can forge the bytes of a worker.
"""

import json
from typing import Any

import msgspec

HEAD_BYTES = 8
# Bound before user code can put something else in their place.
_pack, _unpack = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
_to_json, _from_json = json.JSONEncoder(separators=(",", ":")).encode, json.JSONDecoder().decode
_MSGPACK, _JSON = 0, 1
_FORMAT_SHIFT = 56


class FrameError(Exception):
    """The bytes are not a frame."""


def frame(value: dict[str, Any]) -> bytes:
    """A value with its head.

    Raises:
        TypeError, ValueError, RecursionError, MemoryError: Neither format carries it.
    """
    kind = _MSGPACK
    try:
        body = _pack(value)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError):
        kind, body = _JSON, _to_json(value).encode()
    return (kind << _FORMAT_SHIFT | len(body)).to_bytes(HEAD_BYTES, "big") + body


def body_size(head: bytes | bytearray) -> int:
    """Bytes after the head that `head` begins with."""
    return int.from_bytes(head[1:HEAD_BYTES], "big")


def is_msgpack(head: bytes | bytearray) -> bool:
    """Whether msgpack carries the value; its texts are then whole."""
    return head[0] == _MSGPACK


def read(head: bytes | bytearray, body: bytes) -> Any:
    """The value of a frame.

    Raises:
        FrameError: The bytes are not a frame.
    """
    try:
        if head[0] == _MSGPACK:
            return _unpack(body)
        if head[0] == _JSON:
            return _from_json(body.decode())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(str(error)) from error
    raise FrameError(f"a frame of format {head[0]}")
