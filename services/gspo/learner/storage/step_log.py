"""The step files: the write-ahead log of what is trained, one Parquet file a step, never changed once it has its name.

It does not know how groups end otherwise or when files may go (rundir.py does).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gspo.learner.assembly.rows import SCHEMA, Row, from_table, to_table
from gspo.learner.storage.disk_space import DiskSpace
from gspo.learner.storage.durable_files import fsync, link_new, temporary

_NAME = re.compile(r"step-(\d{6,})\.parquet")


def _encoding() -> dict[str, Any]:
    """Log-probs hardly repeat: to look for a dictionary of them took 0.4 of the writing; their bytes apart compress."""
    paths = {c.name: f"{c.name}.list.element" if pa.types.is_list(c.type) else c.name for c in SCHEMA}
    logp = paths.pop("logp")
    return {"use_dictionary": list(paths.values()), "column_encoding": {logp: "BYTE_STREAM_SPLIT"}}


_ENCODING = _encoding()


class StepLog:
    """The step files of one folder.

    Args:
        disk: Waits for room, where it does.
    """

    def __init__(self, folder: Path, disk: DiskSpace | None = None) -> None:
        self.folder, self._disk = folder, disk or DiskSpace()

    def path(self, step: int) -> Path:
        """Where a step's file is, or will be."""
        return self.folder / f"step-{step:06d}.parquet"

    def steps(self) -> list[int]:
        """The steps that have a file, in order."""
        return sorted(int(match[1]) for file in self.folder.iterdir() if (match := _NAME.fullmatch(file.name)))

    def write(self, step: int, rows: Sequence[Row]) -> None:
        """Write a step's rows in training order; they are on the disk when this returns.

        FileExistsError: the step has a file already; it stays as it is.
        """
        table = to_table(rows)
        self._disk.retry_until_written(self.path(step).name, self.folder, lambda: self._write_whole(step, table))

    def _write_whole(self, step: int, table: Any) -> None:
        unfinished = temporary(self.path(step))
        try:
            pq.write_table(table, unfinished, compression="zstd", **_ENCODING)
        except OSError:
            unfinished.unlink(missing_ok=True)  # half a file would take the room that others need
            raise
        link_new(unfinished, self.path(step))

    def read(self, step: int) -> list[Row]:
        """A step's rows in training order. FileNotFoundError: no such step. ValueError: not a step file of ours."""
        return from_table(self._read_table(step))

    def groups(self, step: int) -> list[int]:
        """The groups in a step, in order; reads nothing but their numbers."""
        return sorted(set(self._read_table(step, columns=["group"]).column("group").to_pylist()))

    def remove(self, steps: Sequence[int]) -> None:
        """Remove the files of some steps."""
        for step in steps:
            self.path(step).unlink()
        fsync(self.folder)

    def _read_table(self, step: int, columns: list[str] | None = None) -> Any:
        # Without partitioning=None a folder named a=b above the run directory would add a column.
        return pq.read_table(self.path(step), columns=columns, partitioning=None)
