"""A submitted source before it is run: does it compile, what does it import, where is its function.

An import that is put together at run time is not seen here; the sandbox bounds what it can do.
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
        rule: Which rule is broken, one of a few words: field, syntax, import, signature, load, test.
        line: In the source, from 1; None where no line is at fault.
        column: In that line, from 1.
        traceback: The function's own, where it raised.
        output: What the function printed.
        field: Of what was sent, where one is at fault.
    """

    rule: str
    text: str
    line: int | None = None
    column: int | None = None
    traceback: str = ""
    output: str = ""
    field: str | None = None


class SubmissionRefusedError(Exception):
    """A submission that is not taken, with every reason found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = list(problems)


class Outline(msgspec.Struct, frozen=True):
    """What inside/read_source.py saw of a source; each item is a name with its line and column, from 1.

    Attributes:
        wrong: Why it cannot be compiled, with line and column; None where it can.
    """

    wrong: tuple[str, int, int] | None = None
    imports: list[tuple[str, int, int]] = []
    defined: list[tuple[str, int, int]] = []

    def place_of(self, names: Sequence[str]) -> tuple[int, int]:
        """Line and column of the first definition that has one of `names`, else of the first public one, else 1, 1."""
        named = [one for one in self.defined if one[0] in names] or [one for one in self.defined if one[0][:1] != "_"]
        return named[0][1:] if named else (1, 1)


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
        """What a source holds.

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
    """Check that a source imports the standard library and what is allowed.

    Raises:
        SubmissionRefusedError: It imports something else; with line and column of each place.
    """
    found = [_import_problem(*place, allowed_packages) for place in outline.imports]
    if problems := [problem for problem in found if problem]:
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
            f"reward.allowed_packages ({allowed}). Do without it, or have it added there"
        )
    return Problem("import", text, line, column)


@cache
def importable(packages: tuple[str, ...]) -> frozenset[str]:
    """Top-level modules that the named distributions bring; one that is not installed goes by its own name."""
    wanted = {_normal(package) for package in packages}
    found = {
        module
        for module, distributions in packages_distributions().items()
        if wanted & {_normal(distribution) for distribution in distributions}
    }
    return frozenset(found | {package.replace("-", "_") for package in packages})


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
