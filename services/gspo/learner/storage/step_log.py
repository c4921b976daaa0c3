"""The step files: the write-ahead log, one Parquet file a step, unchanged once it has its name.

run_directory.py decides when a file may be removed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gspo.common.host.durable_write import fsync
from gspo.learner.assembly.rows import SCHEMA, Row, TokenRecord, from_table, to_table
from gspo.learner.storage.durable_files import DiskSpace, link_new, temporary
from gspo.learner.storage.group_results import rewards_differ
from gspo.runlog.step_files import read_columns, step_file, step_files, token_file

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
        path, table = self.path(step), to_table(rows)
        self._disk.retry_until_written(path.name, self.folder, lambda: _write_new(path, table, **_ENCODING))

    def write_tokens(self, step: int, records: Sequence[TokenRecord]) -> None:
        """Write a trained step's token records, whole or not at all; nothing if there are none or the file is there."""
        path = token_file(self.folder, step)
        if not records or path.exists():
            return
        columns = {
            "group": pa.array([record.group for record in records], pa.int64()),
            "number": pa.array([record.number for record in records], pa.int32()),
            "learner_logp": pa.array([record.logp_T for record in records], pa.list_(pa.float32())),
            "entropy": pa.array([record.entropy_T for record in records], pa.list_(pa.float32())),
        }
        self._disk.retry_until_written(path.name, self.folder, lambda: _write_new(path, pa.table(columns)))

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
        names = ["group", "reward", "skipped", "advantage"]
        table = read_columns(self.path(step), names).select(names)
        return rewards_differ(zip(*table.to_pydict().values(), strict=True))

    def remove(self, steps: Sequence[int]) -> None:
        """Remove the files of some steps, with their token records."""
        for step in steps:
            token_file(self.folder, step).unlink(missing_ok=True)
            self.path(step).unlink()
        fsync(self.folder)


def _write_new(path: Path, table: pa.Table, **encoding: Any) -> None:
    unfinished = temporary(path)
    try:
        pq.write_table(table, unfinished, compression="zstd", **encoding)
    except OSError:
        unfinished.unlink(missing_ok=True)  # half a file takes space that others need
        raise
    link_new(unfinished, path)
