"""One replica's copy of the registry: a file for each version and each name, and the audit.

    content/VERSION.json   as it was written, until it is removed
    names/NAME.json        replaced as a whole
    audit.jsonl            appended to

Every file appears whole under its name. `OfflineRegistry` reads the copy where no Redis
runs, as before a run.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import structlog

from gspo.common.errors import nearest
from gspo.common.host.durable_write import replace_file
from gspo.reward.registry.records import (
    RETIRED,
    Content,
    NotRegisteredError,
    RegisteredName,
    UnreadableError,
    parse_name,
    read_content,
)

log = structlog.get_logger()


class DiskCopy:
    """The files below one folder, made when first written."""

    def __init__(self, folder: Path) -> None:
        self._contents, self._names, self._audit = folder / "content", folder / "names", folder / "audit.jsonl"

    def write_content(self, version: str, text: str) -> None:
        """Write the file of a version; an empty text removes it."""
        path = self._contents / f"{version}.json"
        if text:
            replace_file(path, text.encode())
        else:
            path.unlink(missing_ok=True)

    def list_contents(self) -> set[str]:
        """The versions that the copy has."""
        return {path.stem for path in self._contents.glob("*.json")}

    def read_content(self, version: str) -> str | None:
        """A version's text; None if the copy lacks it."""
        try:
            return (self._contents / f"{version}.json").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def write_name(self, name: RegisteredName) -> None:
        """Replace the file of a name."""
        replace_file(self._names / f"{name.name}.json", name.model_dump_json().encode())

    def stamp(self) -> int:
        """A number that changes with every file of a name, also if another process wrote it."""
        try:
            return self._names.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def read_names(self) -> dict[str, RegisteredName]:
        """Every name that can be read; the others are logged and stay as they are."""
        names = {}
        for path in sorted(self._names.glob("*.json")):
            try:
                names[path.stem] = parse_name(path.stem, path.read_bytes())
            except UnreadableError as error:
                log.error("registry_unreadable", name=path.stem, reason=str(error), detail="the copy on disk")
        return names

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


class OfflineRegistry:
    """The copy in one folder, as a run that has not started will find it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._disk = folder, DiskCopy(folder)

    async def resolve(self, name: str, version: str = "") -> Content:
        """As `Registry.resolve`.

        Raises:
            NotRegisteredError: The copy has no such name or version, or it cannot be read.
        """
        names = self._disk.read_names()
        if name not in names:
            hint = nearest(name, names) if names else "Nothing is registered there."
            raise NotRegisteredError(f"there is no reward function '{name}' in {self._folder}. {hint}")
        whole = names[name].find(version) if version else names[name].active
        text = self._disk.read_content(whole) if whole else None
        if text is None:
            raise NotRegisteredError(RETIRED.format(name=name) if not whole else f"there is no version {whole[:12]}")
        return read_content(whole, text)
