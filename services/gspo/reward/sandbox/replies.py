"""Replies of a worker, by strict types: user code can forge them, so everything in them is checked here."""

from __future__ import annotations

import signal
from typing import Any, cast

import msgspec

from gspo.common.plain_json import plain_json, whole_text
from gspo.reward.sandbox.calls import CallError, FailureKind, Question, Signature
from gspo.reward.sandbox.inside.frames import FrameError, is_msgpack, read
from gspo.reward.sandbox.values import failure_of

# A megabyte of empty lists is a million objects, which hold up the event loop for 0.3 s. A batch of 64 answers that all
# failed, each with the longest traceback, has 0.4 MiB.
MAX_VALUES_BYTES = 2**19
_MAX_LINE = 10**6


class ErrorReply(msgspec.Struct, frozen=True):
    """An exception of the user's code, as inside/results.py describes it."""

    kind: str
    type: str
    text: str
    place: str = ""
    traceback: str = ""
    line: int | None = None


class Reply(msgspec.Struct):
    """An answer to the question `id`; one of values, values_json, signature and error is there, or none.

    Attributes:
        output: The printed output; the service sets it.
    """

    id: str
    values: list[Any] | None = None
    values_json: str | None = None
    signature: Signature | None = None
    error: ErrorReply | None = None
    threads_left: int = 0
    output: str = ""


class TooLargeError(Exception):
    """A reply has more values than the service reads."""


class _Values(msgspec.Struct):
    values: msgspec.Raw = msgspec.Raw()


# Fields that the types do not name are skipped, and make no objects.
_unpack, _unpack_values = msgspec.msgpack.Decoder(Reply).decode, msgspec.msgpack.Decoder(_Values).decode


def read_reply(head: bytes | bytearray, body: bytes) -> Reply:
    """The reply in a frame; text in it is whole.

    Raises:
        FrameError: The bytes are not a reply.
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


def values_in(reply: Reply, question: Question) -> Any:
    """The values of a batch, or the JSON value of an environment's function.

    Raises:
        CallError: There are none.
    """
    if "function" not in question:
        if reply.values is None:
            raise CallError("forbidden", "its process answered something else than values")
        return reply.values
    if reply.values_json is None:
        raise CallError("forbidden", "its process answered something else than a JSON value")
    try:
        return plain_json(reply.values_json)
    except (ValueError, RecursionError) as error:
        raise CallError("invalid_return", f"returned something that is not JSON: {error}") from error


def reply_error(error: ErrorReply, output: str) -> CallError:
    """The failure of a call whose user code raised."""
    failure = failure_of(msgspec.structs.asdict(error))
    return CallError(
        cast(FailureKind, failure.kind),  # an exception's
        failure.reason,
        error_type=failure.error_type or "unknown",
        traceback=failure.traceback,
        output=output,
        line=error.line if type(error.line) is int and 0 < error.line < _MAX_LINE else None,
    )


def end_error(code: int | None, output: str) -> CallError:
    """The failure of a call whose process ended, with exit code `code` (negative for a signal, None if unknown)."""
    kind: FailureKind = "forbidden" if code == -signal.SIGSYS else "crash"
    if code is None:
        cause = "it closed the channel"
    else:
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = output.strip().splitlines()
    last = f"; it last wrote: {lines[-1][:200]}" if lines else ""
    return CallError(kind, f"its process died ({cause}){last}", output=output)
