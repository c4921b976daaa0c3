"""JSON of data files: every value as the text has it, or an error with its place.

Whole numbers of any size are exact, and others are float64. Values that JSON does not define (NaN, a key twice, half of
a character) or that would change (1e400) are refused.
"""

import json
import math
import sys
from typing import Any

# Deeper values would exhaust the stacks of the processes that read them later.
MAX_DEPTH = 100


class RowError(ValueError):
    """A row has a fault.

    Attributes:
        number: Its line or row, from 1.
        reason: A phrase behind the place.
        fix: What the user can do.
        character: In the line, from 1; None if the row as a whole is meant.
    """

    def __init__(self, number: int, reason: str, fix: str = "Correct it", *, character: int | None = None) -> None:
        self.number, self.reason, self.fix, self.character = number, reason, fix, character
        super().__init__(f"{self.in_line(f'{number}')}: {reason}")

    def in_line(self, line: str) -> str:
        """The place of the fault, where the line has this name."""
        return line if self.character is None else f"{line}, character {self.character}"


class _PartError(ValueError):
    """A part of a text is not JSON, or its value would not be the written one."""

    def __init__(self, part: str, rule: str) -> None:
        super().__init__(f"{part} {rule}")
        self.part = part


def _constant(text: str) -> Any:
    raise _PartError(text, "is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _PartError(text, "is beyond the numbers that a program can hold")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _PartError(json.dumps(twice, ensure_ascii=False), "is a key twice in one object")
    return members


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_constant, object_pairs_hook=_unique)


def read_value(text: str, start: int = 0, *, line: int = 1) -> tuple[Any, int]:
    """One value of a text, and the place behind it.

    Args:
        start: Place of its first character.
        line: Line of the text's first character, for errors.

    Raises:
        RowError: With line and column of the fault.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise _fault(text, error.pos, line, f"is not JSON: {error.msg}") from error
    except _PartError as error:
        raise _fault(text, max(start, text.find(error.part, start)), line, str(error)) from error
    except RecursionError as error:
        raise _fault(text, start, line, f"is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        rule = f"has a whole number of more than {sys.get_int_max_str_digits()} digits"
        raise _fault(text, start, line, rule) from error
    part = text[start:end]
    if part.count("[") + part.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise _fault(text, start, line, f"is nested deeper than {MAX_DEPTH} levels")
    if (half := part.lower().find("\\ud")) >= 0 and _has_half(value):
        raise _fault(text, start + half, line, "has half of a surrogate pair")
    return value, end


def read_text(text: str, *, line: int = 1) -> Any:
    """The only value of a text.

    Raises:
        RowError: There is none, or more.
    """
    start = skip_blank(text, 0)
    value, end = read_value(text, start, line=line)
    if (rest := skip_blank(text, end)) < len(text):
        raise _fault(text, rest, line, "is not JSON: something stands behind the value")
    return value


def skip_blank(text: str, start: int) -> int:
    """The place of the next character that is not JSON's white space."""
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    return start


def _fault(text: str, place: int, line: int, reason: str) -> RowError:
    number = line + text.count("\n", 0, place)
    excerpt = text[place : place + 40].split("\n")[0]
    character = place - text.rfind("\n", 0, place)
    return RowError(number, reason + (f": {excerpt}" if excerpt else ""), character=character)


def _is_deeper(value: Any, levels: int) -> bool:
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if members is None:
        return False
    return levels == 0 or any(_is_deeper(member, levels - 1) for member in members)


def _has_half(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
