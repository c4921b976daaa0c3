"""The rows of a data set in a temporary file, a line each: memory holds their places alone.

A run trains on this copy: a change of the files while it runs has no effect. Columns of bytes are in it only as base64,
where the user asks for it.
"""

import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from gspo.common.data.row_reader import DataRow
from gspo.common.errors import InputError


class RowStore:
    """Rows by number.

    Attributes:
        names: Every column that a row has, in the order of their first appearance.

    Raises:
        InputError: The folder for temporary files cannot hold them.
    """

    def __init__(self, rows: Iterable[DataRow]) -> None:
        names: dict[str, None] = {}
        self._files: list[str] = []
        self._starts, self._file_of, self._numbers = array("q", [0]), array("H"), array("q")
        try:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object
            for row in rows:
                names.update(dict.fromkeys(row.columns))
                self._add(row)
            self._file.flush()
        except OSError as error:
            rule = f"{tempfile.gettempdir()} cannot hold the run's copy of its data ({error.strerror})"
            raise InputError("TMPDIR", rule, "Set this variable to a folder on a disk with free space") from error
        self.names = list(names)

    def _add(self, row: DataRow) -> None:
        line = json.dumps(row.columns, ensure_ascii=False).encode()
        self._file.write(line)
        self._starts.append(self._starts[-1] + len(line))
        if not self._files or self._files[-1] != row.file:
            self._files.append(row.file)
        self._file_of.append(len(self._files) - 1)
        self._numbers.append(row.number)

    def __len__(self) -> int:
        return len(self._numbers)

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of these numbers, each 0 .. len - 1, with all columns: one that a row leaves out is None."""
        empty = dict.fromkeys(self.names)
        return [{**empty, **self._row(number)} for number in numbers]

    def values(self, column: str, numbers: Sequence[int]) -> list[Any]:
        """A column of these rows; None where a row leaves it out."""
        return [self._row(number).get(column) for number in numbers]

    def place(self, number: int) -> str:
        """File and line of a row."""
        return f"{self._files[self._file_of[number]]} {self._numbers[number]}"

    def _row(self, number: int) -> dict[str, Any]:
        start, end = self._starts[number], self._starts[number + 1]
        row: dict[str, Any] = json.loads(os.pread(self._file.fileno(), end - start, start))
        return row
