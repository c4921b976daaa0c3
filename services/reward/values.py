"""What a reward function returned for one answer: checked, and never a number where it is not one.

It calls nothing. Neighbours: worker_process.py encodes what is read here, scorer.py sums it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Failure:
    """Why one answer has no reward."""

    reason: str


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


def read_value(raw: Any, convention: Literal["trl", "verl"]) -> Value | Failure:
    """One value as worker_process.plain_value encodes it.

    A dict of a TRL function is summed; of a verl function its `score` counts and its other numbers are reported.
    """
    if isinstance(raw, dict) and "error" in raw:
        return Failure(describe(raw["error"]))
    if not (isinstance(raw, dict) and "parts" in raw):
        number = _number(raw)
        return number if isinstance(number, Failure) else Value(number)
    parts = {name: _number(part) for name, part in raw["parts"].items()}
    if convention == "verl":
        return _verl_value(parts)
    numbers = {}
    for name, part in parts.items():
        if isinstance(part, Failure):
            return Failure(f"part '{name}': {part.reason}")
        numbers[name] = part
    return Value(sum(numbers.values()), parts=numbers) if numbers else Failure("returned no parts")


def _verl_value(parts: dict[str, float | Failure]) -> Value | Failure:
    score = parts.get("score", Failure("returned a dict without 'score'"))
    if isinstance(score, Failure):
        return score
    extras = {name: part for name, part in parts.items() if name != "score" and not isinstance(part, Failure)}
    return Value(score, extras=extras)


def _number(raw: Any) -> float | Failure:
    if isinstance(raw, float) and math.isfinite(raw):
        return raw
    if raw is None or isinstance(raw, float):
        return Failure(f"returned {raw if raw is None else _not_finite(raw)}")
    was = raw.get("type", "dict") if isinstance(raw, dict) else type(raw).__name__
    return Failure(f"returned {was} where a number belongs")


def _not_finite(raw: float) -> str:
    return "NaN" if math.isnan(raw) else "infinity" if raw > 0 else "minus infinity"


def describe(error: dict[str, str]) -> str:
    """An exception of the user's code in one line, with its place in the file."""
    if error["type"] == "Unfit":
        return error["text"]
    return f"raised {error['text']}" + (f" ({error['place']})" if error["place"] else "")
