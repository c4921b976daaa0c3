"""The value that a reward function returned for one answer: checked, and a number only if the function gave one."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from gspo.reward.sandbox.calls import FAILURE_KINDS

# Each part is a column of logs and pages.
MAX_PARTS, MAX_NAME_CHARS = 64, 100
MAX_REASON_CHARS, MAX_TRACEBACK_CHARS = 2000, 4000
# Exceptions of inside/, whose text is a message already.
OWN_ERROR_TYPES = ("UnfitError", "SeveralFunctionsError", "InvalidReturnError", "")
NO_VALUE, NOT_FINITE, NOT_A_NUMBER = "NoValue", "NotFinite", "NotANumber"


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
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    extras: dict[str, float] = field(default_factory=dict)


def read_value(raw: Any, convention: str) -> Value | Failure:
    """One value as inside/results.py encodes it. User code can forge it, so its form is checked here.

    A dict of a TRL function is summed; of a verl or OpenRLHF function its `score` counts and its other numbers are
    reported.
    """
    if isinstance(raw, dict) and isinstance(error := raw.get("error"), dict):
        return failure_of(error)
    if not (isinstance(raw, dict) and isinstance(raw.get("parts"), dict)):
        number = _number(raw)
        return number if isinstance(number, Failure) else Value(number)
    if unfit := _unfit_names(raw["parts"]):
        return _invalid(unfit)
    parts = {name: _number(part) for name, part in raw["parts"].items()}
    numbers = {name: part for name, part in parts.items() if not isinstance(part, Failure)}
    if convention in ("verl", "openrlhf"):
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
    if not math.isfinite(total):
        return _invalid("the sum of its parts is not finite", NOT_FINITE)
    return Value(total, parts=numbers)


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
    if isinstance(raw, float) and math.isfinite(raw):
        return raw
    if raw is None:
        return _invalid("returned None", NO_VALUE)
    if isinstance(raw, float):
        shown = "NaN" if math.isnan(raw) else "infinity" if raw > 0 else "minus infinity"
        return _invalid(f"returned {shown}", NOT_FINITE)
    named = raw.get("type") if isinstance(raw, dict) else None
    shown = named[:MAX_NAME_CHARS] if isinstance(named, str) else type(raw).__name__
    return _invalid(f"returned {shown} where a number belongs", NOT_A_NUMBER)


def failure_of(error: dict[str, Any]) -> Failure:
    """An exception of the user's code, in one line with its place in the file; parts of a wrong type are left out."""
    kind, text, place = error.get("kind"), _text(error, "text")[:MAX_REASON_CHARS], _text(error, "place")
    error_type, traceback = _text(error, "type")[:MAX_NAME_CHARS], _text(error, "traceback")[-MAX_TRACEBACK_CHARS:]
    if not text:
        reason = "failed without a message"
    elif error_type in OWN_ERROR_TYPES:
        reason = text
    else:
        reason = f"raised {text}" + (f" ({place[:MAX_NAME_CHARS]})" if place else "")
    known = isinstance(kind, str) and kind in FAILURE_KINDS
    return Failure(reason, str(kind) if known else "exception", traceback, error_type)


def _text(error: dict[str, Any], name: str) -> str:
    value = error.get(name)
    return value if isinstance(value, str) else ""
