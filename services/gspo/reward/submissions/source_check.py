"""Checks of a submitted source before it runs: it compiles, and imports only allowed packages.

An import that is put together at run time is not checked here; the sandbox bounds its effect.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import msgspec

from gspo.reward.sandbox.calls import Callee, CallError, CallLimits, Code
from gspo.reward.sandbox.inside import read_source
from gspo.reward.sandbox.values import MAX_NAME_CHARS

MAX_PROBLEMS = 20
# 256 KiB of ordinary source need less than a third of it.
READ_LIMITS = CallLimits(timeout_s=20.0, memory_mb=512, cpu_s=5.0)


@dataclass(frozen=True)
class Problem:
    """One reason to refuse a submission.

    Attributes:
        rule: The broken rule: field, syntax, import, signature, load or test.
        line: In the source, from 1; None if the problem has no line.
        column: In that line, from 1.
        traceback: The function's own, if it raised.
        output: The printed output of the function.
        field: The field of the request; None if the problem has no field.
    """

    rule: str
    text: str
    line: int | None = None
    column: int | None = None
    traceback: str = ""
    output: str = ""
    field: str | None = None


class SubmissionRefusedError(Exception):
    """A submission is refused, with all its problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = list(problems)


class Outline(msgspec.Struct, frozen=True):
    """The outline of a source from inside/read_source.py; each item is a name with its line and column, from 1.

    Attributes:
        wrong: Why it cannot be compiled, with line and column; None if it can.
    """

    wrong: tuple[str, int, int] | None = None
    imports: list[tuple[str, int, int]] = []
    defined: list[tuple[str, int, int]] = []

    def place_of(self, names: Sequence[str]) -> tuple[int, int]:
        """Line and column of the first definition that has one of `names`, else of the first public one, else 1, 1."""
        places = [item for item in self.defined if item[0] in names]
        places = places or [item for item in self.defined if not item[0].startswith("_")]
        return places[0][1:] if places else (1, 1)


class SourceReader:
    """Reads sources in the sandbox, within limits of its own: their compilation may take any time and memory.

    Args:
        new_sandbox: Makes the sandbox; nothing is started before the first source is read.
    """

    def __init__(self, new_sandbox: Callable[[Code, CallLimits], Callee]) -> None:
        text = Path(read_source.__file__).read_text(encoding="utf-8")
        version = hashlib.sha256(text.encode()).hexdigest()
        code = Code("read_source", text, version, "read_source.py", kind="environment")
        self._sandbox = new_sandbox(code, READ_LIMITS)

    async def read(self, source: str) -> Outline:
        """The outline of a source.

        Raises:
            SubmissionRefusedError: It cannot be compiled, or not within the limits.
        """
        try:
            question = {"function": "reset", "arguments": {"task": {"source": source}}}
            answer = await self._sandbox.call(question, session=None)
            outline = msgspec.convert(answer.values[0], Outline)
        except CallError as error:
            raise SubmissionRefusedError(
                [Problem("syntax", f"the source cannot be compiled: {error}", 1, 1)]
            ) from error
        if outline.wrong is not None:
            raise SubmissionRefusedError([Problem("syntax", *outline.wrong)])
        return outline

    async def close(self) -> None:
        """End its processes."""
        await self._sandbox.close()


def check_imports(outline: Outline, allowed_packages: Collection[str]) -> None:
    """Check that a source imports only the standard library and allowed packages.

    Raises:
        SubmissionRefusedError: It imports something else; with line and column of each place.
    """
    imports = (_import_problem(*place, allowed_packages) for place in outline.imports)
    if problems := [problem for problem in imports if problem]:
        raise SubmissionRefusedError(problems[:MAX_PROBLEMS])


def _import_problem(module: str, line: int, column: int, allowed_packages: Collection[str]) -> Problem | None:
    top = module.split(".")[0]
    place = f"line {line}, column {column}"
    if module.startswith("."):
        text = f"{place}: imports '{module}' from beside it, and a submission is one file. Put it into the source"
    elif top in sys.stdlib_module_names or top in importable(tuple(sorted(allowed_packages))):
        return None
    else:
        allowed = ", ".join(sorted(allowed_packages)) or "none"
        text = (
            f"{place}: imports '{top[:MAX_NAME_CHARS]}', which is neither in the standard library nor among "
            f"reward.allowed_packages ({allowed}). Do without it, or ask for its addition there"
        )
    return Problem("import", text, line, column)


@cache
def importable(packages: tuple[str, ...]) -> frozenset[str]:
    """Top-level modules of the named distributions; one that is not installed goes by its own name."""
    normal = {_normal(package) for package in packages}
    modules = {
        module
        for module, distributions in packages_distributions().items()
        if normal & {_normal(distribution) for distribution in distributions}
    }
    return frozenset(modules | {package.replace("-", "_") for package in packages})


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
