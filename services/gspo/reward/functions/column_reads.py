"""The columns that a reward function reads from its `**columns`, by its source text: a missing one is None in silence.

It runs nothing. Reads in helper functions, or by a computed name, are not seen.
"""

import ast
from collections.abc import Collection, Iterator

# Methods of a dictionary that give a default in place of a missing key.
_SILENT = ("get", "pop", "setdefault")


def silent_columns(text: str, entry: str, columns: Collection[str]) -> list[str]:
    """Columns that a function reads by `columns.get(...)` or a parameter with the default None, and that are missing.

    A read with another one as its default, such as `columns.get("a") or columns.get("b")`, counts if all are missing.

    Args:
        text: The function's source.
        entry: Its name.
        columns: Those that it can get.
    """
    function = next(
        (node for node in ast.walk(ast.parse(text)) if isinstance(node, _FUNCTIONS) and node.name == entry), None
    )
    if function is None:  # imported, or made by a call
        return []
    groups = [{name} for name in _parameters_of_none(function.args)]
    if function.args.kwarg is not None:
        groups += _reads(function, function.args.kwarg.arg)
    missing = [sorted(group) for group in groups if not group & set(columns)]
    return list(dict.fromkeys(name for group in missing for name in group))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _parameters_of_none(arguments: ast.arguments) -> Iterator[str]:
    places = [*arguments.posonlyargs, *arguments.args]
    with_default = [*zip(places[len(places) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    for parameter, default in [*with_default, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]:
        if isinstance(default, ast.Constant) and default.value is None:
            yield parameter.arg


def _reads(node: ast.AST, mapping: str) -> Iterator[set[str]]:
    """The names that each expression reads; those of an `or`, and of a default, together."""
    if isinstance(node, ast.BoolOp) or _read(node, mapping):
        if names := {name for part in ast.walk(node) if (name := _read(part, mapping))}:
            yield names
        return
    for part in ast.iter_child_nodes(node):
        yield from _reads(part, mapping)


def _read(node: ast.AST, mapping: str) -> str:
    """The name that a call such as `columns.get("answer")` reads; empty if it is another node."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=name), attr=method), args=[ast.Constant(value=str(column)), *_]
        ) if name == mapping and method in _SILENT:
            return column
    return ""
