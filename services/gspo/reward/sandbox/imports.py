"""The imports of a user's source: packages that all its workers share, and files beside its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

# Slow to import, and free of other effects: the supervisor, which is less confined, imports no others.
_KNOWN = """
    numpy scipy pandas sympy torch transformers sklearn math_verify latex2sympy2_extended regex rapidfuzz jsonschema
    pydantic nltk Levenshtein
"""
KNOWN = frozenset(_KNOWN.split())


class Importable:
    """The modules and packages at the paths that a function may read.

    Attributes:
        folders: Folders of modules.
        modules: Name -> file of single modules, and of packages.
    """

    def __init__(self, reads: Sequence[Path]) -> None:
        packages = {path.name: path / "__init__.py" for path in reads if (path / "__init__.py").is_file()}
        self.folders = [path for path in reads if path.is_dir() and path.name not in packages]
        self.modules = packages | {path.stem: path for path in reads if path.suffix == ".py"}

    def __contains__(self, name: str) -> bool:
        return name in self.modules or any(_holds(folder, name) for folder in self.folders)


def packages_to_share(text: str, importable: Importable) -> list[str]:
    """Known packages that a text seems to import, in their order, but for those that its own files shadow.

    It compares lines and parses nothing, because the text is not trusted. Workers do an import that it misses; an
    import in a comment costs time alone.
    """
    packages = dict.fromkeys(name for name in _imported(text) if name.partition(".")[0] in KNOWN)
    return [name for name in packages if name.partition(".")[0] not in importable]


def _holds(folder: Path, name: str) -> bool:
    return (folder / name).exists() or (folder / f"{name}.py").exists()


def _imported(text: str) -> Iterator[str]:
    for line in text.splitlines():
        words = line.replace(",", " , ").split()
        if words[:1] == ["from"] and len(words) > 2 and words[2] == "import":
            yield words[1]
        elif words[:1] == ["import"]:
            yield from (word for before, word in pairwise(words) if before in ("import", ","))
