"""Replies of a worker, and the values in them: user code can forge them, so everything in them is checked here.

A reply has strict types, and a value is a number only if the function gave one.
"""

import signal
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import msgspec

from gspo.common.plain_json import plain_json, whole_text
from gspo.common.score_numbers import number_fault
from gspo.reward.sandbox.calls import FAILURE_KINDS, CallError, FailureKind, Question, Signature
from gspo.reward.sandbox.inside.frames import FrameError, is_msgpack, read

# A megabyte of empty lists is a million objects, which hold up the event loop for 0.3 s. A batch of 64 answers that all
# failed, each with the longest traceback, has 0.4 MiB.
MAX_VALUES_BYTES = 2**19
_MAX_LINE = 10**6
# Each part is a column of logs and pages.
MAX_PARTS, MAX_NAME_CHARS = 64, 100
MAX_REASON_CHARS, MAX_TRACEBACK_CHARS = 2000, 4000
# Exceptions of inside/, whose text is a message already.
OWN_ERROR_TYPES = ("UnfitError", "SeveralFunctionsError", "InvalidReturnError", "")
NO_VALUE, NOT_FINITE, NOT_A_NUMBER = "NoValue", "NotFinite", "NotANumber"
# Of a dict by these conventions `score` counts alone, and each needs a right answer.
SCORE_CONVENTIONS = frozenset({"verl", "verl_batch", "openrlhf"})


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

    Beside values is logged_json, where the function logged something.

    Attributes:
        output: The printed output; the service sets it.
    """

    id: str
    values: list[Any] | None = None
    values_json: str | None = None
    signature: Signature | None = None
    error: ErrorReply | None = None
    logged_json: str = ""
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
    failure = failure_of(error)
    return CallError(
        cast(FailureKind, failure.kind),  # an exception's
        failure.reason,
        error_type=failure.error_type or "unknown",
        traceback=failure.traceback,
        output=output,
        line=error.line if error.line is not None and 0 < error.line < _MAX_LINE else None,
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


@dataclass(frozen=True)
class Failure:
    """Why one answer has no reward.

    Attributes:
        kind: A FailureKind, `unknown_function`, or the kind with which an environment failed.
        error_type: Class of the exception in the user's code, or NO_VALUE, NOT_FINITE or NOT_A_NUMBER; else "".
    """

    reason: str
    kind: str
    traceback: str = field(default="", compare=False)
    error_type: str = field(default="", compare=False)


@dataclass(frozen=True)
class Value:
    """One function's reward of one answer.

    Attributes:
        reward: The number that counts.
        parts: Named parts whose sum is the reward, if the function returned such.
        extras: Named numbers beside the reward, reported and not counted.
        columns: Named values of the answer that the function logged.
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    extras: dict[str, float] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)


# None: the function does not apply to the answer, as TRL says it.
Result: TypeAlias = Value | Failure | None


def read_value(raw: Any, convention: str) -> Result:
    """One value as inside/results.py encodes it. User code can forge it, so its form is checked here.

    A dict of a TRL function is summed, and its None is none. Of a verl or OpenRLHF function the `score` of a dict
    counts and its other numbers are reported.
    """
    if raw is None and convention == "trl":
        return None
    if isinstance(raw, dict) and isinstance(error := raw.get("error"), dict):
        try:
            return failure_of(msgspec.convert(error, ErrorReply))
        except msgspec.ValidationError:
            return Failure("failed without a message", "exception")
    if not (isinstance(raw, dict) and isinstance(raw.get("parts"), dict)):
        number = _number(raw)
        return number if isinstance(number, Failure) else Value(number)
    if unfit := _unfit_names(raw["parts"]):
        return _invalid(unfit)
    parts = {name: _number(part) for name, part in raw["parts"].items()}
    numbers = {name: part for name, part in parts.items() if not isinstance(part, Failure)}
    if convention in SCORE_CONVENTIONS:
        score = parts.get("score", _invalid("returned a dict without 'score'"))
        if isinstance(score, Failure):
            return score
        return Value(score, extras={name: number for name, number in numbers.items() if name != "score"})
    for name, part in parts.items():
        if isinstance(part, Failure):
            return _invalid(f"part '{name}': {part.reason}", part.error_type)
    if not numbers:
        return _invalid("returned no parts")
    total = sum(numbers.values())
    if fault := number_fault(total):
        return _invalid(f"the sum of its parts is {fault}", NOT_FINITE)
    return Value(total, parts=numbers)


def with_logged(results: list[Result], logged_json: str) -> list[Result]:
    """The results of a call with its metrics and columns, as inside/supplied.py writes them.

    A metric belongs to each answer with a value, so the mean over a step counts answers.

    Raises:
        CallError: It has another form: user code can forge it.
    """
    try:
        logged = msgspec.convert(plain_json(logged_json), _Logged)
        if len(logged.columns) != len(results):
            raise ValueError(f"{len(logged.columns)} rows for {len(results)} answers")
        for named in (logged.metrics, *logged.columns):
            if unfit := _unfit_names(named):
                raise ValueError(unfit)
        for name, number in logged.metrics.items():
            if fault := number_fault(number):
                raise ValueError(f"the metric '{name}' is {fault}")
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        text = f"logged something that cannot be taken: {error}"
        raise CallError("invalid_return", text[:MAX_REASON_CHARS], error_type="InvalidReturnError") from error
    return [
        replace(result, extras={**logged.metrics, **result.extras}, columns=columns)
        if isinstance(result, Value)
        else result
        for result, columns in zip(results, logged.columns, strict=True)
    ]


class _Logged(msgspec.Struct):
    metrics: dict[str, float]
    columns: list[dict[str, Any]]


def _unfit_names(parts: Collection[Any]) -> str | None:
    """The problem with the names of parts; None for good ones."""
    if len(parts) > MAX_PARTS:
        return f"returned {len(parts)} parts, and at most {MAX_PARTS} are taken"
    for name in parts:
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME_CHARS):
            shown = repr(name[:MAX_NAME_CHARS]) if isinstance(name, str) else type(name).__name__
            return f"returned a part named {shown}: a name has 1 to 100 printable characters"
    return None


def _invalid(reason: str, error_type: str = "") -> Failure:
    return Failure(reason, "invalid_return", error_type=error_type)


def _number(raw: Any) -> float | Failure:
    if isinstance(raw, float):
        fault = number_fault(raw)
        return _invalid(f"returned {fault}", NOT_FINITE) if fault else raw
    if raw is None:
        return _invalid("returned None", NO_VALUE)
    named = raw.get("type") if isinstance(raw, dict) else None
    shown = named[:MAX_NAME_CHARS] if isinstance(named, str) else type(raw).__name__
    return _invalid(f"returned {shown} where a number belongs", NOT_A_NUMBER)


def failure_of(error: ErrorReply) -> Failure:
    """An exception of the user's code, in one line with its place in the file."""
    text, error_type = error.text[:MAX_REASON_CHARS], error.type[:MAX_NAME_CHARS]
    if not text:
        reason = "failed without a message"
    elif error_type in OWN_ERROR_TYPES:
        reason = text
    else:
        reason = f"raised {text}" + (f" ({error.place[:MAX_NAME_CHARS]})" if error.place else "")
    kind = error.kind if error.kind in FAILURE_KINDS else "exception"
    return Failure(reason, kind, error.traceback[-MAX_TRACEBACK_CHARS:], error_type)
