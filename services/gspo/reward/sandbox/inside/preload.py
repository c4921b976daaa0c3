"""Packages that are imported once, by the supervisor, for all its workers; and the folder for what they write then."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

_REASON_CHARS = 500


def preload(packages: Iterable[str], folder: Path) -> dict[str, str]:
    """Import what the user's code will ask for, once for all its workers; `folder` is made, for what they write.

    Returns:
        Package -> why its import failed. What such an import left behind (half a module, a C extension that cannot be
        loaded twice) stays in this process: where there is one, start another without that package.
    """
    folder.mkdir(mode=0o700)
    use_as_temporary(folder)
    failed = {}
    for name in packages:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever a package's import raises; the service logs it
            failed[name] = f"{type(error).__name__}: {error}"[:_REASON_CHARS]
    return failed


def use_as_temporary(folder: Path) -> None:
    """Make a folder this process's temporary one, and its home."""
    os.environ.update(HOME=str(folder), TMPDIR=str(folder))
    tempfile.tempdir = None  # what it found before
