"""What a reward function returned for one answer: checked, and never a number where it is not one.

It calls nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from gspo.reward.sandbox.calls import FAILURE_KINDS, FailureKind

# Each part is a column of logs and pages.
MAX_PARTS, MAX_NAME_CHARS = 64, 100
MAX_REASON_CHARS, MAX_TRACEBACK_CHARS = 2000, 4000
# Each member of a list or object is read in the event loop; commas and brackets in texts count too.
MAX_JSON_MEMBERS = 100_000


@dataclass(frozen=True)
class Failure:
    """Why one answer has no reward."""

    reason: str
    kind: FailureKind
    traceback: str = field(default="", compare=False)


@dataclass(frozen=True)
class Value:
    """One function's reward of one answer.

    Attributes:
        reward: The number that counts.
        parts: Named parts whose sum is the reward, where the function returned such.
        extras: Named numbers beside the reward, reported and not counted.
    """

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    extras: dict[str, float] = field(default_factory=dict)


def read_value(raw: Any, convention: str) -> Value | Failure:
    """One value as inside/results.py encodes it; what came is the user's word, so its form is checked here.

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
    return _verl_value(parts) if convention in ("verl", "openrlhf") else _sum_of(parts)


def _sum_of(parts: dict[str, float | Failure]) -> Value | Failure:
    numbers = {}
    for name, part in parts.items():
        if isinstance(part, Failure):
            return _invalid(f"part '{name}': {part.reason}")
        numbers[name] = part
    if not numbers:
        return _invalid("returned no parts")
    total = sum(numbers.values())
    return Value(total, parts=numbers) if math.isfinite(total) else _invalid("the sum of its parts is not finite")


def _unfit_names(parts: Collection[Any]) -> str | None:
    """What is wrong with the names of parts."""
    if len(parts) > MAX_PARTS:
        return f"returned {len(parts)} parts, and at most {MAX_PARTS} are taken"
    for name in parts:
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME_CHARS):
            shown = repr(name[:MAX_NAME_CHARS]) if isinstance(name, str) else type(name).__name__
            return f"returned a part named {shown}: a name has 1 to 100 printable characters"
    return None


def whole_text(value: Any) -> Any:
    """A value of JSON's kinds with `?` for halves of surrogate pairs: neither UTF-8 nor the contract carries them.

    Raises:
        RecursionError: It is too deep.
    """
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def plain_json(text: str) -> Any:
    """The value of a JSON text, of finite numbers and whole text alone.

    Raises:
        ValueError, RecursionError: It is none, too deep, or has more than MAX_JSON_MEMBERS.
    """
    if sum(map(text.count, ",[{")) > MAX_JSON_MEMBERS:
        raise ValueError(f"it has more than {MAX_JSON_MEMBERS} commas and opening brackets")
    return json.loads(json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False).encode(errors="replace"))


def _invalid(reason: str) -> Failure:
    return Failure(reason, "invalid_return")


def _verl_value(parts: dict[str, float | Failure]) -> Value | Failure:
    score = parts.get("score", _invalid("returned a dict without 'score'"))
    if isinstance(score, Failure):
        return score
    extras = {name: part for name, part in parts.items() if name != "score" and not isinstance(part, Failure)}
    return Value(score, extras=extras)


def _number(raw: Any) -> float | Failure:
    if isinstance(raw, float) and math.isfinite(raw):
        return raw
    if raw is None or isinstance(raw, float):
        return _invalid(f"returned {raw if raw is None else _not_finite(raw)}")
    was = raw.get("type") if isinstance(raw, dict) else None
    named = was[:MAX_NAME_CHARS] if isinstance(was, str) else type(raw).__name__
    return _invalid(f"returned {named} where a number belongs")


def _not_finite(raw: float) -> str:
    return "NaN" if math.isnan(raw) else "infinity" if raw > 0 else "minus infinity"


def failure_of(told: dict[str, Any]) -> Failure:
    """An exception of the user's code, in one line with its place in the file; parts of a wrong type are left out."""
    kind: Any = told.get("kind")
    known = isinstance(kind, str) and kind in FAILURE_KINDS
    return Failure(describe(told), kind if known else "exception", _text(told, "traceback")[-MAX_TRACEBACK_CHARS:])


def describe(told: dict[str, Any]) -> str:
    """The line alone."""
    text, place = _text(told, "text")[:MAX_REASON_CHARS], _text(told, "place")[:MAX_NAME_CHARS]
    if not text:
        return "failed without a word"
    if _text(told, "type") in ("UnfitError", "InvalidReturnError", ""):
        return text
    return f"raised {text}" + (f" ({place})" if place else "")


def _text(told: dict[str, Any], name: str) -> str:
    value = told.get(name)
    return value if isinstance(value, str) else ""
