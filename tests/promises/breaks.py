"""Find a definition by its name, and change code within it by its syntax and not by its text.

So a definition may move, also to another file, and its layout, quotes and comments may change.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from tests.support.repository.source_files import ROOT, text_of

CODE = ("gspo_core", "services/gspo", "benchmarks", "examples")
TESTS = ("tests",)
_DEFINITION = re.compile(r"^ *(?:(?:async )?def|class) (\w+)|^(\w+)(?:: .*)? = ", re.MULTILINE)
# Fields of a syntax tree that follow from the layout or the rest of it.
_IGNORED = {"ctx", "kind", "type_comment"}

Node = ast.expr | ast.stmt


@dataclass(frozen=True)
class Definition:
    """A function, method, class or constant.

    Attributes:
        name: With its module's.
        file: From the root of the repository.
    """

    name: str
    file: str
    node: ast.stmt


@cache
def _files(folders: tuple[str, ...]) -> dict[str, set[str]]:
    """The files that define a name, or have it in their path, by the name."""
    files: dict[str, set[str]] = defaultdict(set)
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for name in [*map("".join, _DEFINITION.findall(text_of(file))), *module_of(file).split(".")]:
            files[name].add(file)
    return files


def files_with(name: str, folders: tuple[str, ...]) -> list[str]:
    """List the files that may define a dotted name, of which the beginning may be missing."""
    return sorted(set.intersection(*(_files(folders)[part] for part in name.split("."))))


def module_of(file: str) -> str:
    """Name a module as an import does."""
    return file.removeprefix("services/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def definitions_of(file: str) -> list[Definition]:
    """All of a module, those within others too."""
    return [Definition(name, file, node) for name, node in _within(ast.parse(text_of(file)), module_of(file))]


def _within(parent: ast.AST, name: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.iter_child_nodes(parent):
        match node:
            case ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own) | ast.ClassDef(name=own):
                yield f"{name}.{own}", node
                yield from _within(node, f"{name}.{own}")
            case ast.Assign(targets=[ast.Name(id=own)]) | ast.AnnAssign(target=ast.Name(id=own)):
                if isinstance(parent, ast.Module):
                    yield f"{name}.{own}", node


def definitions(name: str, folders: tuple[str, ...]) -> list[Definition]:
    """All of a dotted name, of which the beginning may be missing; ValueError if there is none."""
    known = [each for file in files_with(name, folders) for each in definitions_of(file)]
    if not (named := [each for each in known if f".{each.name}".endswith(f".{name}")]):
        raise ValueError(f"nothing in {', '.join(folders)} is named {name}: name a definition that is there")
    return named


def changed(scopes: Sequence[Definition], old: str, new: str) -> tuple[str, str]:
    """Replace the code that stands once in the definitions.

    Args:
        scopes: At least one.
        old: An expression, a statement, or `name=value` of an argument or assignment. `_` stands for any expression,
            `...` at the end of arguments, elements or statements for the rest of them. In a constant with a text of
            several lines (Lua), it is a part of the text.
        new: What takes its place. The first `_` of it is what the first one of `old` stands for, and so on.

    Returns:
        The file, and its text with the change.

    Raises:
        ValueError: `old` does not stand there once, or one of the two has wrong syntax.
    """
    changes = {change for scope in scopes for change in _changes(scope, old, new)}
    if len(changes) != 1:
        places = ", ".join(sorted({f"{scope.name} of {scope.file}" for scope in scopes}))
        raise ValueError(f"`old` stands {len(changes)} times in {places}: give code that stands there once")
    file, start, end, after = changes.pop()
    text = text_of(file).encode()
    return file, (text[:start] + after.encode() + text[end:]).decode()


def _changes(scope: Definition, old: str, new: str) -> Iterator[tuple[str, int, int, str]]:
    """File, first and last byte, and text of each change that is possible."""
    if _has_text(scope.node):
        start, end = _span(scope.file, scope.node)
        for place in re.finditer(re.escape(old.encode()), text_of(scope.file).encode()[start:end]):
            yield scope.file, start + place.start(), start + place.end(), new
        return
    pattern, change, argument = _read(old), _read(new), ""
    match pattern, change:
        case ast.Assign(targets=[ast.Name(id=before)]), ast.Assign(targets=[ast.Name(id=after)]) if before == after:
            pattern, change, argument = pattern.value, change.value, before
    for node in _values(scope.node, argument) if argument else _nodes(scope.node):
        stood_for: list[ast.expr] = []
        if _is_same(pattern, node, stood_for):
            start, end = _span(scope.file, node)
            yield scope.file, start, end, _written(change, iter(stood_for), node.col_offset)


def _has_text(node: ast.AST) -> bool:
    """Whether it is a constant with a text of several lines."""
    texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    is_constant = isinstance(node, ast.Assign | ast.AnnAssign)
    return is_constant and any(isinstance(text, str) and "\n" in text for text in texts)


def _read(text: str) -> Node:
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"`{text}` has wrong syntax: {error}") from None
    if len(body) != 1:
        raise ValueError(f"`{text}` is not one expression or statement: give one")
    return body[0].value if isinstance(body[0], ast.Expr) else body[0]


def _nodes(parent: ast.AST) -> Iterator[Node]:
    """Yield expressions and statements; within f-strings Python 3.11 knows no positions."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        if not isinstance(node, ast.JoinedStr):
            yield from _nodes(node)


def _values(parent: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yield what arguments and variables of a name are set to."""
    for node in ast.walk(parent):
        match node:
            case (
                ast.keyword(arg=own, value=value)
                | ast.Assign(targets=[ast.Name(id=own)], value=value)
                | ast.AnnAssign(target=ast.Name(id=own), value=ast.expr() as value)
            ) if own == name:
                yield value


def _is_same(pattern: object, node: object, stood_for: list[ast.expr]) -> bool:
    """Compare syntax trees; what each `_` stands for is appended."""
    match pattern, node:
        case ast.Name(id="_"), ast.expr():
            stood_for.append(node)
            return True
        case [*start, rest], [*others] if _is_rest(rest):
            return _is_same(start, others[: len(start)], stood_for)
        case ast.Call(args=[*_, rest]), ast.Call() if _is_rest(rest):
            return _is_same([pattern.func, pattern.args], [node.func, node.args], stood_for)
        case [*start], [*others]:
            return len(start) == len(others) and all(map(_is_same, start, others, [stood_for] * len(start)))
        case ast.AST(), ast.AST() if type(pattern) is type(node):
            fields = [name for name in pattern._fields if name not in _IGNORED]
            return all(_is_same(getattr(pattern, name), getattr(node, name), stood_for) for name in fields)
    return type(pattern) is type(node) and pattern == node


def _is_rest(node: object) -> bool:
    """`...`, also as a statement."""
    return isinstance(node, ast.expr | ast.stmt) and ast.unparse(node) == "..."


def _written(change: Node, stood_for: Iterator[ast.expr], indent: int) -> str:
    class Filled(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return next(stood_for) if node.id == "_" else node

    text = ast.unparse(Filled().visit(change))
    if isinstance(change, ast.expr) and not isinstance(change, ast.Starred):
        return f"({text})"
    return textwrap.indent(text, " " * indent).strip()


def _span(file: str, node: Node) -> tuple[int, int]:
    """First and last byte of a node."""
    lines, last = _line_starts(file), node.end_lineno or node.lineno
    return lines[node.lineno - 1] + node.col_offset, lines[last - 1] + (node.end_col_offset or 0)


@cache
def _line_starts(file: str) -> list[int]:
    starts = [0]
    for line in text_of(file).encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts
