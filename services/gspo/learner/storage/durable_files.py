"""Writes that are on the disk when they return, and that a kill at any moment leaves whole or absent.

It knows nothing of what is written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from gspo.learner.storage.disk_space import DiskSpace

# A name that ends so is unfinished: removed at the next start, read by nobody.
TEMPORARY = ".tmp"


def fsync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary(path: Path) -> Path:
    """The name that stands for `path` until it is whole; in the same folder, so that a rename is atomic."""
    return path.with_name(path.name + TEMPORARY)


def replace_whole(path: Path, data: bytes) -> None:
    """Make `data` the content of a file; a reader sees the old content or the new one."""
    unfinished = temporary(path)
    unfinished.write_bytes(data)
    fsync(unfinished)
    unfinished.replace(path)
    fsync(path.parent)


def link_new(unfinished: Path, path: Path) -> None:
    """Give a written file its final name, once: FileExistsError where the name is taken, and that file stays."""
    try:
        fsync(unfinished)
        # Unlike a rename, link() never replaces what is there.
        os.link(unfinished, path)
    finally:
        unfinished.unlink()
    fsync(path.parent)


def finite_or_null(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Figures for strict JSON, which has no NaN: null where a value is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


class JsonLines:
    """A file of one JSON object a line that only grows.

    Opening it cuts off a last line without an end, which a kill left.

    Args:
        disk: Waits for room, where it does.
    """

    def __init__(self, path: Path, disk: DiskSpace | None = None) -> None:
        self.path, self._disk = path, disk or DiskSpace()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        fsync(path.parent)
        self._cut_torn_line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._descriptor)

    def records(self) -> list[dict[str, Any]]:
        """All lines. ValueError: one is not JSON; something else wrote into the file."""
        records = []
        for number, line in enumerate(self.path.read_bytes().splitlines(), start=1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: not a line that the learner wrote ({error})") from error
        return records

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add lines; they are on the disk when this returns."""
        data = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()
        self._disk.retry_until_written(
            f"{len(data)} bytes of {self.path.name}", self.path, lambda: self._write_whole(data)
        )

    def _write_whole(self, data: bytes) -> None:
        """Write all of it, or nothing: what a full disk took of a line would stand before the next one."""
        before = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, before)
            raise

    def _cut_torn_line(self) -> None:
        data = self.path.read_bytes()
        num_whole = data.rfind(b"\n") + 1
        if num_whole < len(data):
            os.ftruncate(self._descriptor, num_whole)
            os.fsync(self._descriptor)
