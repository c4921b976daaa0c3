"""Durable writes: on the disk when they return, and whole or absent after a kill at any moment."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from gspo.common.host.durable_write import TEMPORARY, fsync
from gspo.learner.storage.disk_space import DiskSpace
from gspo.runlog.run_log import Record, read_own_records


def temporary(path: Path) -> Path:
    """The name that stands for `path` until it is whole, in the same folder. The next start removes such files."""
    return path.with_name(path.name + TEMPORARY)


def link_new(unfinished: Path, path: Path) -> None:
    """Give a written file its final name, once.

    Raises:
        FileExistsError: The name is taken; that file stays, and the unfinished one is removed.
    """
    try:
        fsync(unfinished)
        # Unlike a rename, link() never replaces a file.
        os.link(unfinished, path)
    finally:
        unfinished.unlink()
    fsync(path.parent)


def finite_or_null(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Figures for strict JSON, which has no NaN: a value that is not finite becomes null."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


class JsonLines:
    """A file of one JSON object a line that only grows.

    Opening it cuts off a torn last line, whose writer was killed.

    Args:
        disk: Waits for free disk space.
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

    def records(self, parse: Callable[[Mapping[str, Any]], Record]) -> list[Record]:
        """The records of all lines.

        Raises:
            ValueError: A line holds no such record: the learner did not write it.
        """
        return read_own_records(self.path, parse).records

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add lines; they are on the disk when this returns."""
        data = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()
        self._disk.retry_until_written(
            f"{len(data)} bytes of {self.path.name}", self.path, lambda: self._write_whole(data)
        )

    def _write_whole(self, data: bytes) -> None:
        """Write all of it, or nothing: a part of a line would corrupt the next one."""
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
