"""Reads a submitted source without running it: whether it compiles, its imports and its definitions.

A few hundred bytes can make a parser and a compiler take any time and memory. So they run in the sandbox, as an
environment without steps, which services/gspo/reward/submissions/admission.py calls.
"""

import ast
from collections.abc import Iterator
from typing import Any

MAX_IMPORTS = 1000


def reset(task: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The outlines of the file `task["source"]`, under the path "", and of `task["modules"]`, by their paths.

    Each is {"wrong": [text, line, column]}, or
    {"imports": [[module, line, column], ...], "defined": [[name, line, column], ...]}.
    """
    return {path: _outline(text) for path, text in {"": task["source"], **task["modules"]}.items()}, ""


def _outline(source: str) -> dict[str, Any]:
    try:
        tree = ast.parse(source)
        compile(tree, "submission", "exec", dont_inherit=True)
    except SyntaxError as error:
        line, column = error.lineno or 1, max(error.offset or 1, 1)
        return {"wrong": [f"line {line}, column {column}: {error.msg}", line, column]}
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        return {"wrong": [f"the source cannot be compiled: {str(error) or type(error).__name__}", 1, 1]}
    places = [(module, node.lineno, node.col_offset + 1) for node, module in imports(tree)]
    if len(places) > MAX_IMPORTS:
        return {"wrong": [f"the source has {len(places)} imports, and at most {MAX_IMPORTS} are read", 1, 1]}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return {"imports": places, "defined": [(node.name, node.lineno, node.col_offset + 1) for node in functions]}


def step(state: Any, action: str) -> tuple[Any, str, float, bool]:
    """End at once: there are no steps."""
    return state, action, 0.0, True


def imports(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
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
