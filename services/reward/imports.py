"""Which packages a source text imports, found without running it, to be imported once for all its workers.

Neighbours: sandbox.py asks, the supervisor imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

# Slow to import, and known to do nothing but that: the supervisor, which is confined less, imports no others.
_KNOWN = """
    numpy scipy pandas sympy torch transformers sklearn math_verify latex2sympy2_extended regex rapidfuzz jsonschema
    pydantic nltk Levenshtein
"""
KNOWN = frozenset(_KNOWN.split())


def packages_to_share(text: str, folders: Sequence[Path]) -> list[str]:
    """Known packages that a text imports anywhere, in their order, but for those that one of `folders` shadows."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = dict.fromkeys(name for name in _imported(tree) if name.partition(".")[0] in KNOWN)
    return [name for name in found if not any(_holds(folder, name.partition(".")[0]) for folder in folders)]


def _holds(folder: Path, name: str) -> bool:
    return (folder / name).exists() or (folder / f"{name}.py").exists()


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
