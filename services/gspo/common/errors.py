"""The error of a user's input. Our own faults are tracebacks."""

import difflib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import yaml
from pydantic import BaseModel

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
# The process has put on record what it will do otherwise; a supervisor starts it again, and counts no death.
EXIT_START_AGAIN = 4
# Beginning of a line of a check that does not end the run.
WARNING = "warning: "
MAX_LISTED = 50
# A value of other programs may have more levels than Python has frames: below so many it is cut.
_MOST_LEVELS = 32
_LONGEST_VALUE = 300
# A proposal that shares less with the word than this is far-fetched: 'tracking' for 'trainer' has 0.53.
_LIKE_ENOUGH = 0.6


class InputError(Exception):
    """The user's input cannot work: names the key or file, the value, the rule and the fix.

    Args:
        where: The key, file or field, as the user wrote it.
        rule: The broken rule, with the value that breaks it.
        fix: The change that helps.
    """

    def __init__(self, where: str, rule: str, fix: str) -> None:
        super().__init__(f"{where}: {rule}. {fix}")
        self.where, self.rule, self.fix = where, rule, fix


class StartAgainError(Exception):
    """The process has to be started again: what it will do otherwise then is on record."""


NO_VALUE: Final = object()


class ConfigError(ValueError):
    """A configuration value breaks a rule; pydantic keeps it in its own error.

    Args:
        key: The key, relative to the section whose validator raises; empty for the validated value itself.
        value: The value, shown as YAML in front of the rule; NO_VALUE where it would say nothing.
        rule: The broken rule.
        fix: The change that helps.
    """

    def __init__(self, key: str, value: Any, rule: str, fix: str) -> None:
        self.key, self.value, self.rule, self.fix = key, value, rule, fix
        super().__init__(str(self.as_input_error()))

    def as_input_error(self, section: str = "") -> InputError:
        """The same error under the full name of its key."""
        where = ".".join(part for part in (section, self.key) if part)
        rule = self.rule if self.value is NO_VALUE else f"{in_yaml(self.value)} {self.rule}"
        return InputError(where, rule, self.fix)


EntryProblem = Literal["too_large", "undecodable", "schema", "malformed"]


class MalformedEntryError(ValueError):
    """The bytes are not an entry that this version reads; `kind` is the bounded name of the problem."""

    def __init__(self, detail: str, kind: EntryProblem = "malformed") -> None:
        super().__init__(detail)
        self.kind: EntryProblem = kind


def exit_bad_input(error: InputError) -> NoReturn:
    """Print the error for the person who called, and exit with code 2."""
    print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the message is for the person who called
    sys.exit(EXIT_BAD_INPUT)


def warn(text: str) -> None:
    """Write a warning of a check to standard error; `gspo run` and `gspo doctor` show it."""
    sys.stderr.write(f"{WARNING}{text}\n")


def printable(text: str) -> str:
    """Text of others with its control characters as escapes, so that they cannot change the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def nearest(word: str, known: Iterable[str]) -> str:
    """'Did you mean ...?' for an unknown word, or the known ones when none is near."""
    choices = sorted(known)
    match = difflib.get_close_matches(word, choices, n=1, cutoff=_LIKE_ENOUGH)
    more = f" and {len(choices) - MAX_LISTED} more" if len(choices) > MAX_LISTED else ""
    return f"Did you mean '{match[0]}'?" if match else f"Known are: {', '.join(choices[:MAX_LISTED])}{more}."


def in_yaml(value: Any) -> str:
    """A value of the configuration as its user would write it: YAML in one line, keys at their defaults left out."""
    text = yaml.safe_dump(
        _plain(value), default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    text = text.removesuffix("\n").removesuffix("\n...").replace("\n", " ")
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."


def _plain(value: Any, levels: int = _MOST_LEVELS) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, Mapping | list | tuple | set | frozenset) and not levels:
        return "..."
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item, levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, levels - 1) for item in value]
    return str(value) if isinstance(value, Path) else value
