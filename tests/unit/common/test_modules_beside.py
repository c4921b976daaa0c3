"""The modules that a Python file takes along: those beside it that it imports, read and never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.common.errors import InputError
from gspo.common.modules_beside import MAX_MODULE_BYTES, MAX_MODULES, modules_beside

FILES = {
    "helpers.py": "raise SystemExit('never run')\nimport words",
    "words.py": "import json\nfrom kit import parse",
    "kit/__init__.py": "",
    "kit/parse.py": "from . import numbers\nfrom .deep.er import x",
    "kit/numbers.py": "",
    "kit/deep/__init__.py": "",
    "kit/deep/er.py": "x = 1",
    "kit/unused.py": "",
    "json.py": "",
    "plain/part.py": "import late",
    "late.py": "",
    "unused.py": "",
    "numpy/tools.py": "",
    "data/table.csv": "",
}


def beside(folder: Path, source: str, files: dict[str, str] = FILES, **options: object) -> list[str]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return list(modules_beside(folder / "reward.py", source, "reward.functions.0.path", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "paths"),
    [
        ("import os, math", []),
        ("import json", []),
        ("import numpy.tools", []),
        ("import data, nowhere", []),
        ("def reward(completions):\n    import late", ["late.py"]),
        ("from plain.part import x", ["late.py", "plain/part.py"]),
        ("from plain import part", ["late.py", "plain/part.py"]),
        ("from kit import numbers", ["kit/__init__.py", "kit/numbers.py"]),
        ("import kit.deep.er as er", ["kit/__init__.py", "kit/deep/__init__.py", "kit/deep/er.py"]),
        (
            "from helpers import score",
            [name for name in FILES if name.startswith(("helpers", "words", "kit")) and "unused" not in name],
        ),
        ("from .helpers import score", []),
        ("def broken(:", []),
    ],
)
def test_imported_modules_are_taken_with_what_they_import(tmp_path: Path, source: str, paths: list[str]) -> None:
    assert beside(tmp_path, source) == sorted(paths)


def test_a_module_that_comes_from_elsewhere_stays(tmp_path: Path) -> None:
    assert beside(tmp_path, "import late, plain.part", is_elsewhere=lambda name: name == "plain") == ["late.py"]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"late.py": "x = ("}, r"imports .*late.py, line 1, column 5: '\(' was never closed"),
        ({"late.py": "x" * (MAX_MODULE_BYTES + 1)}, "has more than 1048576 bytes. Name that file under `reads`"),
        (
            {"late.py": "import late1", "late1.py": "#" * MAX_MODULE_BYTES},
            "2 modules .*Name their folder under `reads`",
        ),
        (
            {"late.py": "import late0"} | {f"late{n}.py": f"import late{n + 1}" for n in range(MAX_MODULES)},
            f"imports {MAX_MODULES + 1} modules beside it",
        ),
    ],
)
def test_what_cannot_be_taken_is_named(tmp_path: Path, files: dict[str, str], why: str) -> None:
    with pytest.raises(InputError, match=f"^reward.functions.0.path: .*{why}"):
        beside(tmp_path, "import late", files)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_bytes(b"# coding: utf-8\n\xff")
    with pytest.raises(InputError, match=r"late\.py, which cannot be read"):
        beside(tmp_path, "import late", {})
