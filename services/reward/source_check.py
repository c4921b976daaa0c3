"""Reading a submitted source without running it: does it compile, what does it import, where is its function.

An import that is put together at run time is not seen here; the sandbox bounds what it can do. Neighbours:
submission.py, admission.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions

MAX_PROBLEMS = 20


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


class RefusedError(Exception):
    """A submission that is not taken, with every reason found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = list(problems)


def check_source(source: str, allowed_packages: Collection[str]) -> ast.Module:
    """The parsed source.

    Raises:
        RefusedError: It does not compile, or imports what is not allowed; with line and column of each place.
    """
    tree = _parse(source)
    problems = []
    for node, module in _imports(tree):
        if problem := _import_problem(node, module, allowed_packages):
            problems.append(problem)
    if problems:
        raise RefusedError(problems[:MAX_PROBLEMS])
    return tree


def _parse(source: str) -> ast.Module:
    try:
        tree = ast.parse(source)
        compile(tree, "submission", "exec", dont_inherit=True)
    except SyntaxError as error:
        line, column = error.lineno or 1, max(error.offset or 1, 1)
        raise RefusedError([Problem("syntax", f"line {line}, column {column}: {error.msg}", line, column)]) from error
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        text = str(error) or type(error).__name__
        raise RefusedError([Problem("syntax", f"the source cannot be compiled: {text}", 1, 1)]) from error
    return tree


def _imports(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Every import with the full name of its module; a relative one starts with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node, "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("__import__", "import_module") and isinstance(node.args[0].value, str):
                yield node, node.args[0].value


def _import_problem(node: ast.stmt | ast.expr, module: str, allowed_packages: Collection[str]) -> Problem | None:
    top = module.split(".")[0]
    place = f"line {node.lineno}, column {node.col_offset + 1}"
    if module.startswith("."):
        text = f"{place}: imports '{module}' from beside it, and a submission is one file. Put it into the source"
    elif top in sys.stdlib_module_names or top in importable(tuple(sorted(allowed_packages))):
        return None
    else:
        allowed = ", ".join(sorted(allowed_packages)) or "none"
        text = (
            f"{place}: imports '{top}', which is neither in the standard library nor among reward.allowed_packages "
            f"({allowed}). Do without it, or have it added there"
        )
    return Problem("import", text, node.lineno, node.col_offset + 1)


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


def place_of(tree: ast.Module, names: Sequence[str]) -> tuple[int, int]:
    """Line and column of the first definition that has one of `names`, else of the first public function, else 1, 1."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    named = [node for node in found if node.name in names] or [n for n in found if not n.name.startswith("_")]
    return (named[0].lineno, named[0].col_offset + 1) if named else (1, 1)
