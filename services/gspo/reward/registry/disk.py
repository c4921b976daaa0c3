"""One replica's copy of the registry: a file for each version and each name, and the audit.

    content/VERSION.json   as it was written, until it is removed
    names/NAME.json        replaced as a whole
    audit.jsonl            appended to

Every file appears whole under its name (temporary name, fsync, rename). Neighbour: registry.py, which alone decides
what is newer.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from pathlib import Path


class DiskCopy:
    """The files below one folder, made when first written."""

    def __init__(self, folder: Path) -> None:
        self._contents, self._names, self._audit = folder / "content", folder / "names", folder / "audit.jsonl"

    def write_content(self, version: str, text: str, *, replace: bool = False) -> None:
        """Keep a version; one that is there stays, unless it is to be replaced."""
        if replace or not self.has_content(version):
            _write(self._contents / f"{version}.json", text)

    def remove_content(self, version: str) -> None:
        """Forget a version, where it is there."""
        (self._contents / f"{version}.json").unlink(missing_ok=True)

    def has_content(self, version: str) -> bool:
        """Whether the copy has a version."""
        return (self._contents / f"{version}.json").exists()

    def read_content(self, version: str) -> str | None:
        """A version's text; None where the copy lacks it."""
        try:
            return (self._contents / f"{version}.json").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def write_name(self, name: str, text: str) -> None:
        """Replace what is kept of a name."""
        _write(self._names / f"{name}.json", text)

    def read_name(self, name: str) -> str | None:
        """What is kept of a name; None where that is nothing."""
        try:
            return (self._names / f"{name}.json").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def stamp(self) -> int:
        """Changes with every name that is written, by whomever."""
        try:
            return self._names.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def read_names(self) -> dict[str, str]:
        """What is kept of every name, by name."""
        return {
            path.stem: path.read_text(encoding="utf-8", errors="replace") for path in sorted(self._names.glob("*.json"))
        }

    def append_audit(self, line: str) -> None:
        """Add one line; replicas that share the folder do not cut into each other's."""
        self._audit.parent.mkdir(parents=True, exist_ok=True)
        with self._audit.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def read_audit(self, limit: int) -> list[str]:
        """The newest lines, the oldest of them first."""
        if not self._audit.exists():
            return []
        with self._audit.open(encoding="utf-8") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=limit) if line.endswith("\n")]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, so that a copy that was cut short is never read as a name.
    scratch = path.parent / f".{uuid.uuid4().hex}"
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
