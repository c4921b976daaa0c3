"""Some columns of a log's step files, kept in DuckDB's memory and brought up to date before each question.

A step file never changes, so each is read once. Beyond a bound the newest steps are kept, and the others are read from
their files at each question. It knows the log's folder; the questions are those of log_query.py.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import duckdb

from gspo.runlog.step_files import step_files

READ = "read_parquet(?, union_by_name = true, hive_partitioning = false)"
# Read at once: few enough that their columns are small beside the memory limit.
_BATCH_FILES = 64
# One question reads new files for so long; it reads the remaining ones for itself alone.
_PATIENCE_S = 10.0
# Rows after which the table is compressed, which takes longer than to add a step.
_COMPRESS_ROWS = 20_000

Signature = tuple[int, int, int]


@dataclass(frozen=True)
class Column:
    """A column of the table: its SQL type, and SQL that makes it from the columns of a step file."""

    type: str
    sql: str


class StepTable:
    """A table of the rollouts of a log. One thread at a time uses it.

    Args:
        connection: May read the log's folder.
        name: The table's.
        columns: By name; `step` is one of them.
        size: SQL of a row's size over the table's columns.
        most: The sum of sizes that stays in memory.

    Attributes:
        unreadable: The files that could not be read at the last refresh, each with the reason.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, name: str, columns: Mapping[str, Column], size: str, most: int
    ) -> None:
        self._connection, self._name, self._size, self._most = connection, name, size, most
        self._select = "SELECT " + ", ".join(f'{column.sql} AS "{key}"' for key, column in columns.items())
        # File -> what it was when it was read, and the size of its rows.
        self._signatures: dict[int, Signature] = {}
        self._sizes: dict[int, int] = {}
        self._rest: list[str] = []
        # Steps up to this one were dropped beyond the bound.
        self._dropped, self._num_uncompressed = 0, 0
        self.unreadable: dict[str, str] = {}
        types = ", ".join(f'"{key}" {column.type}' for key, column in columns.items())
        connection.execute(f"CREATE TABLE {name} ({types})")

    def refresh(self, folder: Path) -> None:
        """Read the files that are new, and forget those that are gone or were replaced."""
        files = step_files(folder)
        present = {step: signature for step, path in files.items() if (signature := _signature(path))}
        self._forget([step for step, signature in self._signatures.items() if present.get(step) != signature])
        self.unreadable, failed = {}, set[int]()
        new = [step for step in reversed(files) if step in present and step not in self._signatures]
        end = time.monotonic() + _PATIENCE_S
        for first in range(0, len(new), _BATCH_FILES):
            batch = [step for step in new[first : first + _BATCH_FILES] if step > self._dropped]
            if not batch or time.monotonic() > end:
                break
            failed |= self._read({step: files[step] for step in batch}, present)
            self._drop_beyond_bound()
        self._compress()
        self._rest = [str(files[step]) for step in present if step not in self._signatures and step not in failed]

    def source(self) -> tuple[str, list[list[str]]]:
        """SQL of all rows, for FROM, and the values of its parameters."""
        if not self._rest:
            return self._name, []
        return f"(FROM {self._name} UNION ALL {self._select} FROM {READ})", [self._rest]

    def _read(self, files: Mapping[int, Path], present: Mapping[int, Signature]) -> set[int]:
        """Add files, each by itself where one cannot be read; the steps of those."""
        try:
            self._insert(list(files.values()))
        except duckdb.OutOfMemoryException:
            raise
        except duckdb.Error as error:
            if len(files) > 1:
                return set().union(*(self._read({step: path}, present) for step, path in files.items()))
            for path in files.values():
                if path.exists():
                    self.unreadable[path.name] = str(error).splitlines()[0][:200]
            return set(files)
        sizes = self._connection.execute(
            f"SELECT step, sum({self._size})::BIGINT FROM {self._name} WHERE step BETWEEN ? AND ? GROUP BY step",
            (min(files), max(files)),
        ).fetchall()
        self._signatures |= {step: present[step] for step in files}
        self._sizes |= dict.fromkeys(files, 0) | {step: size for step, size in sizes if step in files}
        return set()

    def _insert(self, paths: Sequence[Path]) -> None:
        sql = f"INSERT INTO {self._name} {self._select} FROM {READ}"
        row = self._connection.execute(sql, [[str(path) for path in paths]]).fetchone()
        self._num_uncompressed += row[0] if row else 0

    def _drop_beyond_bound(self) -> None:
        total, oldest_first = sum(self._sizes.values()), sorted(self._sizes)
        beyond = []
        for step in oldest_first:
            if total <= self._most:
                break
            total -= self._sizes[step]
            beyond.append(step)
        if beyond:
            self._dropped = max(self._dropped, *beyond)
            self._forget(beyond)

    def _forget(self, steps: Sequence[int]) -> None:
        if not steps:
            return
        self._connection.execute(f"DELETE FROM {self._name} WHERE step IN (SELECT unnest(?))", [list(steps)])
        for step in steps:
            del self._signatures[step]
            self._num_uncompressed += 1
            self._sizes.pop(step)

    def _compress(self) -> None:
        """Compress the new rows, to about a third, and free the memory of the deleted ones."""
        if self._num_uncompressed > _COMPRESS_ROWS:
            with suppress(duckdb.TransactionException):  # another thread reads a file; the next call does it
                self._connection.execute("CHECKPOINT")
                self._num_uncompressed = 0


def _signature(path: Path) -> Signature | None:
    """Another one after each change of a file; None if it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
