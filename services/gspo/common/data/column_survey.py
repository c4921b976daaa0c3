"""The columns of a data set by all its rows: missing values, likely mistakes, and text that looks like numbers.

It reads every row once and keeps counts with the first place of each.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.common.data.row_reader import DataRow

_NUMBER = re.compile(r"[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][+-]?[0-9]+)?")
# Beginnings of pictures as base64, and as addresses with their content.
_PICTURE = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "data:image/")
_PICTURE_NAME = (".png", ".jpg", ".jpeg", ".gif", ".webp")
# A share of rows below this is a slip of single rows; above it, the column is made so.
_FEW = 0.05
_LONGEST_CELL = 200


@dataclass
class RowTally:
    """Rows of one kind: how many, and the place of the first."""

    count: int = 0
    first: str = ""

    def add(self, place: str) -> None:
        self.count += 1
        self.first = self.first or place

    def __str__(self) -> str:
        return self.first if self.count == 1 else f"{self.count} rows, the first {self.first}"


@dataclass
class ColumnFacts:
    """The survey of one column.

    Attributes:
        kinds: Kind of value -> the rows that have it; null is "no value".
        numeric: Text that is a number.
        padded: Text with blanks around it.
        pictures: Text that holds or names a picture.
    """

    kinds: dict[str, RowTally] = field(default_factory=dict)
    numeric: RowTally = field(default_factory=RowTally)
    padded: RowTally = field(default_factory=RowTally)
    pictures: RowTally = field(default_factory=RowTally)

    def see(self, value: Any, place: str) -> None:
        """Count a row's value."""
        self.kinds.setdefault(_kind_of(value), RowTally()).add(place)
        if not isinstance(value, str):
            return
        if value.startswith(_PICTURE) or value[-5:].lower().endswith(_PICTURE_NAME):
            self.pictures.add(place)
        if len(value) <= _LONGEST_CELL:
            text = value.strip(" \t")
            if len(text) < len(value):
                self.padded.add(place)
            if _NUMBER.fullmatch(text):
                self.numeric.add(place)

    @property
    def num_values(self) -> int:
        """Rows with a value."""
        return sum(tally.count for kind, tally in self.kinds.items() if kind != NO_VALUE)

    @property
    def looks_like_numbers(self) -> bool:
        """Whether all its values are text, and every one that is not empty is a number."""
        num_empty = self.kinds[_EMPTY].count if _EMPTY in self.kinds else 0
        return self.numeric.count == self.num_values - num_empty > 0


NO_VALUE, _EMPTY = "no value", "empty text"


def _kind_of(value: Any) -> str:
    match value:
        case None:
            return NO_VALUE
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case "":
            return _EMPTY
        case str():
            return "text"
        case list():
            return "a list"
    return "an object"


class ColumnSurvey:
    """The columns of a data set.

    Attributes:
        columns: Facts by name, in the order of first appearance.
        num_rows: Rows seen.
    """

    def __init__(self) -> None:
        self.columns: dict[str, ColumnFacts] = {}
        self.num_rows = 0
        self._first_place = ""

    def watch(self, rows: Iterable[DataRow]) -> Iterator[DataRow]:
        """The same rows, each of them counted."""
        for row in rows:
            place = short_place(row)
            for name in row.columns:
                if name not in self.columns:
                    self._begin(name)
            for name, facts in self.columns.items():
                facts.see(row.columns.get(name), place)
            self._first_place = self._first_place or place
            self.num_rows += 1
            yield row

    def _begin(self, name: str) -> None:
        """A column that no row before had: these have no value of it."""
        facts = self.columns[name] = ColumnFacts()
        if self.num_rows:
            facts.kinds[NO_VALUE] = RowTally(self.num_rows, self._first_place)

    @property
    def few(self) -> int:
        """Up to so many rows are a slip of single rows."""
        return max(1, int(self.num_rows * _FEW))

    def without_value(self, name: str) -> RowTally:
        return self.columns[name].kinds.get(NO_VALUE, RowTally())

    def mistakes(self, *, prompt_column: str) -> Iterator[str]:
        """Likely mistakes in columns, a phrase each; the prompts have checks of their own."""
        for name, facts in self.columns.items():
            if name != prompt_column:
                yield from self._mistakes_of(name, facts)

    def _mistakes_of(self, name: str, facts: ColumnFacts) -> Iterator[str]:
        num_values, few = facts.num_values, self.few
        values = {kind: tally for kind, tally in facts.kinds.items() if kind != NO_VALUE}
        usual = max(values, key=lambda kind: values[kind].count, default="")
        for kind, tally in values.items():
            if kind != usual and tally.count <= few and tally.count < values[usual].count:
                yield f"column '{name}' is {usual} in {values[usual].count} rows, and {kind} in {tally}"
        if 0 < (gap := self.num_rows - num_values) <= few and gap < num_values:
            yield f"column '{name}' has no value in {facts.kinds[NO_VALUE]}"
        if 0 < facts.padded.count <= few:
            yield f"column '{name}' has blanks around its text in {facts.padded}"
        if facts.pictures.count * 2 > num_values:
            yield (
                f"column '{name}' seems to hold images, which the policy does not see; data.types.{name}: omit keeps "
                "them out of the rollouts"
            )


class AnswerConflicts:
    """Rows whose prompt stands in an earlier row with another right answer.

    Attributes:
        rows: How many, with the places of the first such row and of the earlier one.
    """

    def __init__(self) -> None:
        self.rows = RowTally()
        # Hash of a prompt -> hash of its answer, and the number of the row.
        self._seen: dict[int, tuple[int, int]] = {}

    def see(self, prompt: Any, answer: Any, row: DataRow) -> None:
        """Compare a row with those before."""
        asked, answered = (hash(json.dumps(value, sort_keys=True)) for value in (prompt, answer))
        earlier, number = self._seen.setdefault(asked, (answered, row.number))
        if earlier != answered:
            self.rows.add(f"{short_place(row)} and {number}")


def short_place(row: DataRow) -> str:
    """The place of a row with the name of its file alone."""
    file, _, word = row.file.rpartition(", ")
    return f"{Path(file).name}, {word} {row.number}"


def number_columns(survey: ColumnSurvey, types: Mapping[str, str], prompt_column: str) -> list[str]:
    """Columns of text that hold numbers alone, without those whose type the user gives."""
    return [
        name
        for name, facts in survey.columns.items()
        if facts.looks_like_numbers and name not in types and name != prompt_column
    ]
