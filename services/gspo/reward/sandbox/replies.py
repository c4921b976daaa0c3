"""What a worker says, by strict types: its word is the user's, so nothing of it is used that is not checked here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from gspo.reward.sandbox.inside.frames import FrameError, is_msgpack, read
from gspo.reward.sandbox.inside.recognise import MAX_NAME_CHARS, MAX_PARAMETERS
from gspo.reward.sandbox.values import whole_text

# A megabyte of empty lists is a million objects, which hold up the event loop for 0.3 s. A batch of 64 answers that all
# failed, each with the longest traceback, has 0.4 MiB.
MAX_VALUES_BYTES = 2**19

_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
_Names = Annotated[list[_Name], msgspec.Meta(max_length=MAX_PARAMETERS)]


class ErrorReply(msgspec.Struct, frozen=True):
    """An exception of the user's code, as inside/results.py describes it."""

    kind: str
    type: str
    text: str
    place: str = ""
    traceback: str = ""
    line: int | None = None


class SignatureReply(msgspec.Struct, frozen=True):
    """What a loaded function takes, as inside/recognise.py describes it."""

    entry: _Name
    convention: Literal["trl", "verl", "openrlhf", "environment"]
    takes: _Names
    required: _Names
    takes_any: bool

    def __post_init__(self) -> None:
        if not all(name.isidentifier() for name in (*self.takes, *self.required)):
            raise ValueError("a parameter's name is no identifier")
        if self.entry and not self.entry.isidentifier():
            raise ValueError("the function's name is no identifier")


class Reply(msgspec.Struct):
    """An answer to the question `id`; one of values, values_json, signature and error is there, or none.

    Attributes:
        output: What was printed; the service sets it.
    """

    id: str
    values: list[Any] | None = None
    values_json: str | None = None
    signature: SignatureReply | None = None
    error: ErrorReply | None = None
    threads_left: int = 0
    output: str = ""


class TooLargeError(Exception):
    """A reply has more values than the service reads."""


class _Values(msgspec.Struct):
    values: msgspec.Raw = msgspec.Raw()


# What the types do not name is passed over, and makes no objects.
_unpack, _unpack_values = msgspec.msgpack.Decoder(Reply).decode, msgspec.msgpack.Decoder(_Values).decode


def read_reply(head: bytes | bytearray, body: bytes) -> Reply:
    """The reply in a frame; text in it is whole.

    Raises:
        FrameError: There is none.
        TooLargeError: Its values have more than MAX_VALUES_BYTES. A `values_json` is one text, which the frame bounds.
    """
    try:
        if is_msgpack(head):
            _check_size(memoryview(_unpack_values(body).values).nbytes)
            return _unpack(body)
        _check_size(len(body))
        return msgspec.convert(whole_text(read(head, body)), Reply)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(str(error)) from error


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_VALUES_BYTES:
        raise TooLargeError(f"its answer has {num_bytes} bytes of values, and at most {MAX_VALUES_BYTES} are read")
