"""The repository's own files: each is read and parsed once a process, and a check of them fails with its whole list."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@cache
def text_of(path: str | Path) -> str:
    """Return the text of a file, empty where there is none; a relative path starts at the root of the repository."""
    return (ROOT / path).read_text() if (ROOT / path).is_file() else ""


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return every node of a module's syntax tree."""
    return tuple(ast.walk(ast.parse(source)))


def line_of(text: str, part: str) -> int:
    """Return the number of the first line that has `part`, from 1; 1 if none has it."""
    return text[: max(text.find(part), 0)].count("\n") + 1


def place(path: str | Path, part: str) -> str:
    """Return `file:line` of the first line of a file that has `part`."""
    relative = Path(path).relative_to(ROOT) if Path(path).is_absolute() else path
    return f"{relative}:{line_of(text_of(path), part)}"


def fail_with(violations: Iterable[str]) -> None:
    """Fail the test with all violations, each a line `file:line: rule: fix`, if there are any."""
    if lines := [*violations]:
        pytest.fail(f"{len(lines)} violations\n" + "\n".join(lines), pytrace=False)
