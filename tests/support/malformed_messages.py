"""What no writer of ours sends: random bytes, truncated and flipped messages, other schema numbers, wild fields.

Not a test, and no judge of what is refused: services/gspo/common/streams/entries.py is.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_WHOLE = {FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1), FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
          FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1), FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
          FieldDescriptor.CPPTYPE_ENUM: (0, 2**31 - 1)}  # fmt: skip


def malformed_payloads(good: Message, *, tame: dict[str, Any] | None = None) -> st.SearchStrategy[bytes]:
    """Payloads like `good` and unlike it; some of them can be read after all.

    Args:
        tame: Fields that keep these values in messages that are made up.
    """
    sent = good.SerializeToString()
    made_up = messages(good.DESCRIPTOR).map(lambda message: _with(message, tame or {}).SerializeToString())
    return st.one_of(
        st.binary(max_size=64),
        st.integers(0, len(sent) - 1).map(lambda end: sent[:end]),
        st.tuples(st.integers(0, len(sent) - 1), st.integers(1, 255)).map(lambda flip: _flipped(sent, *flip)),
        st.integers(0, 2**32 - 1).map(lambda schema: _of_schema(_copy(good), schema).SerializeToString()),
        made_up,
    )


def messages(kind: Any, depth: int = 3) -> st.SearchStrategy[Message]:
    """Messages of a kind with any of their fields, at any value that can be sent; schema 1 now and then."""
    fields = {field.name: _field(field, depth) for field in kind.fields if field.message_type is None or depth}
    chosen = st.fixed_dictionaries({}, optional=fields)
    return chosen.map(lambda values: GetMessageClass(kind)(**values))


def _field(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_value(key, depth), _value(value, depth), max_size=2)
    return st.lists(_value(field, depth), max_size=4) if field.is_repeated else _value(field, depth)


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth - 1)
    if field.name == "schema":
        return st.just(1)
    if field.cpp_type in _WHOLE:
        least, most = _WHOLE[field.cpp_type]
        return st.one_of(st.integers(0, 4), st.integers(least, most), st.sampled_from([least, most]))
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.floats(width=32)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=8)
    return st.one_of(st.text(max_size=8), st.sampled_from(["{", "[]", "null", "length_penalty", "\0"]))


def _flipped(sent: bytes, place: int, bits: int) -> bytes:
    return sent[:place] + bytes([sent[place] ^ bits]) + sent[place + 1 :]


def _copy(message: Message) -> Message:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied


def _of_schema(message: Message, schema: int) -> Message:
    """With this schema number wherever it has one."""
    for field, value in message.ListFields():
        if field.name == "schema":
            setattr(message, field.name, schema)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                _of_schema(part, schema)
    return message


def _with(message: Message, values: dict[str, Any]) -> Message:
    for name, value in values.items():
        setattr(message, name, value)
    return message
