"""The step files: the write-ahead log, one Parquet file a step, unchanged once it has its name.

run_directory.py decides when a file may be removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gspo.common.host.durable_write import fsync
from gspo.learner.assembly.rows import SCHEMA, Row, from_table, to_table
from gspo.learner.storage.durable_files import DiskSpace, link_new, temporary
from gspo.learner.storage.group_results import rewards_differ
from gspo.runlog.step_files import read_columns, step_file, step_files

_PATHS = {c.name: f"{c.name}.list.element" if pa.types.is_list(c.type) else c.name for c in SCHEMA}
# Log-probs hardly repeat: a dictionary of them takes 0.4 of the writing, and their split bytes compress.
_ENCODING: dict[str, Any] = {
    "use_dictionary": [path for name, path in _PATHS.items() if name != "logp"],
    "column_encoding": {_PATHS["logp"]: "BYTE_STREAM_SPLIT"},
}


class StepLog:
    """The step files of one folder.

    Args:
        disk: Waits for free disk space.
    """

    def __init__(self, folder: Path, disk: DiskSpace | None = None) -> None:
        self.folder, self._disk = folder, disk or DiskSpace()

    def path(self, step: int) -> Path:
        """The path of a step's file, also before it exists."""
        return step_file(self.folder, step)

    def steps(self) -> list[int]:
        """The steps that have a file, in order."""
        return list(step_files(self.folder))

    def write(self, step: int, rows: Sequence[Row]) -> None:
        """Write a step's rows in training order; they are on the disk when this returns.

        Raises:
            FileExistsError: The step has a file already, which stays.
        """
        table = to_table(rows)
        self._disk.retry_until_written(self.path(step).name, self.folder, lambda: self._write_whole(step, table))

    def _write_whole(self, step: int, table: Any) -> None:
        unfinished = temporary(self.path(step))
        try:
            pq.write_table(table, unfinished, compression="zstd", **_ENCODING)
        except OSError:
            unfinished.unlink(missing_ok=True)  # half a file takes space that others need
            raise
        link_new(unfinished, self.path(step))

    def read(self, step: int) -> list[Row]:
        """A step's rows in training order.

        Raises:
            FileNotFoundError: The step has no file.
            ValueError: The columns are not those of a step file of this version.
        """
        # Without partitioning=None a folder named a=b above the run directory would add a column.
        return from_table(pq.read_table(self.path(step), partitioning=None))

    def results(self, step: int) -> dict[int, bool]:
        """The groups in a step, in order, each with whether its rewards differed; reads no other column."""
        table = read_columns(self.path(step), ["group", "reward", "skipped"])
        return rewards_differ(zip(*table.to_pydict().values(), strict=True))

    def remove(self, steps: Sequence[int]) -> None:
        """Remove the files of some steps."""
        for step in steps:
            self.path(step).unlink()
        fsync(self.folder)
