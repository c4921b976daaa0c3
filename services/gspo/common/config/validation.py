"""What pydantic says about a wrong configuration, in our words: one error that names every wrong key."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gspo.common.config.fields import PATTERNS
from gspo.common.config.reference import explain, meaning, names_at, section_at
from gspo.common.errors import InputError, in_yaml, nearest


def as_input_error(error: ValidationError, source: str) -> InputError:
    """One error for everything that is wrong.

    Args:
        source: What is read, for the head of a list: the file's name.
    """
    problems: dict[str, InputError] = {}
    for problem in _without_consequences(error.errors()):
        found = _explain(problem)
        problems.setdefault(found.where, found)
    if len(problems) == 1:
        return next(iter(problems.values()))
    listed = "".join(f"\n  {problem}" for problem in problems.values())
    return InputError(source, f"{len(problems)} keys are wrong", f"Mend each of them:{listed}")


def _explain(problem: ErrorDetails) -> InputError:
    where, value = _place(problem["loc"]), in_yaml(problem["input"])
    if problem["type"] == "extra_forbidden":
        return InputError(where, f"is not a key (value {value})", _proposal(where))
    if problem["type"] == "missing":
        return InputError(where, "is missing", f"Set it: {meaning(where)}")
    if problem["type"] == "value_error":
        key, _, rule = str(problem["ctx"]["error"]).partition(": ")
        if not rule:  # it is about the value alone, and names no key
            key, rule = where, key
        elif where and not key.startswith(where.split(".")[0]):  # said from within a list, which knows no place
            key = f"{where}.{key}"
        rule, _, fix = rule.rpartition(". ")
        return InputError(key, rule, fix)
    if problem["type"] == "string_pattern_mismatch":
        wanted = PATTERNS[problem["ctx"]["pattern"]]
        return InputError(where, f"{value} is not allowed", f"Write {wanted}")
    return InputError(where, f"{value} is not allowed: {problem['msg']}", f"It is: {meaning(where)}")


def _place(loc: tuple[int | str, ...]) -> str:
    """The key that a problem is about: pydantic adds the name of each form that a value of several may have."""
    parts = [str(part) for part in loc]
    for number in range(1, len(parts)):
        if not section_at(".".join(parts[:number])):
            # Behind a value stand its items and keys, and the forms, which no key is named like.
            inner = [part for part in parts[number:] if part.isdigit()]
            return ".".join([*parts[:number], *inner])
    return ".".join(parts)


def _proposal(where: str) -> str:
    """The nearest key of that section, or the place where a key of that very name is."""
    section, _, name = where.rpartition(".")
    elsewhere = [key.name for key in explain() if key.name.rpartition(".")[2] == name]
    if elsewhere:
        return f"Did you mean {' or '.join(elsewhere)}?"
    return nearest(name, names_at(section))


def _without_consequences(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without a list that is too short only because one of its items has a problem of its own."""
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem in problems
        if problem["type"] != "too_short"
        or not any(
            len(place) > len(problem["loc"]) and place[: len(problem["loc"])] == problem["loc"] for place in places
        )
    ]
