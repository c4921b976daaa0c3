"""Rows of JSON Lines, JSON and CSV files. No type is guessed: JSON's values keep their types, a cell of CSV is text."""

import csv
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from gspo.common.data.strict_json import RowError, read_text, read_value, skip_blank

NumberedRow = tuple[int, dict[str, Any]]
_BOM = "\ufeff"


def json_rows(path: Path) -> Iterator[NumberedRow]:
    """Rows with the lines where they begin: of an object a line, of objects over several lines, or of one list.

    Raises:
        RowError: A row is not a JSON object.
        OSError: The file cannot be read.
    """
    with _open(path) as file:
        lines = _text_lines(file)
        is_first = True
        for number, text in lines:
            if not text.strip():
                continue
            try:
                value = read_text(text.rstrip(), line=number)
            except RowError as fault:
                yield from _rows_of_rest(text, lines, number, fault)
                return
            if is_first and isinstance(value, list):
                yield from _rows_of_document("".join([text, *(more for _, more in lines)]), number)
                return
            is_first = False
            yield number, _row(value, number)


def _rows_of_rest(text: str, lines: Iterator[tuple[int, str]], number: int, fault: RowError) -> Iterator[NumberedRow]:
    """The rows from a line on that is not a row of its own, but may begin one of several lines.

    Args:
        lines: Those behind it.
        fault: Why it is not a row of its own.
    """
    rows = _rows_of_document("".join([text, *(more for _, more in lines)]), number)
    try:
        first = next(rows, None)
    except RowError as error:
        begins_several = text.lstrip().startswith("[") or text.strip() == "{"
        raise (error if begins_several else fault) from error
    if first is not None:
        yield first
    yield from rows


def csv_rows(path: Path) -> Iterator[NumberedRow]:
    """Rows with the lines where they begin; every cell is the text of the file.

    Raises:
        RowError: A row has another number of cells than the header, or its quotes do not match.
        OSError: The file cannot be read.
    """
    csv.field_size_limit(sys.maxsize)
    with _open(path) as file:
        reader = csv.reader((text for _, text in _text_lines(file)), strict=True)
        names: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise RowError(line, f"is not CSV ({error})") from error
            if cells is None:
                return
            if not cells:  # a blank line
                continue
            if names is None:
                names = _names(cells, line)
                continue
            if len(cells) != len(names):
                rule = f"has {len(cells)} cells, and the header has {len(names)}"
                raise RowError(line, rule, 'Write "..." around cells with commas')
            yield line, dict(zip(names, cells, strict=True))


def _names(cells: list[str], line: int) -> list[str]:
    """The names of the columns; one without a name, such as an index that pandas wrote, gets the name of its place."""
    names = [name or f"Unnamed: {place}" for place, name in enumerate(cells)]
    if len(names) == 1 and (other := next((sign for sign in ";\t|" if sign in names[0]), None)):
        raise RowError(line, f"separates cells by {other!r}, and CSV by commas: {names[0]:.80}", "Write it with commas")
    if any("\0" in name for name in names):
        raise RowError(line, "has zero bytes, as UTF-16 has", "Save it as UTF-8")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise RowError(line, f"names two columns '{name}'", "Give each a name of its own")
        seen.add(name)
    return names


def _open(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb"))


def _text_lines(file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; only a line feed ends a line, as JSON Lines has it."""
    for number, line in enumerate(file, start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise RowError(number, f"is not UTF-8 ({error})", "Save it as UTF-8") from error
        yield number, text.removeprefix(_BOM) if number == 1 else text


def _rows_of_document(text: str, first: int) -> Iterator[NumberedRow]:
    """The objects of a list, or objects one after the other; `first` is the line of the text's first character."""
    place = counted = skip_blank(text, 0)
    line = first + text.count("\n", 0, place)
    in_list = text[place] == "["
    place = skip_blank(text, place + in_list)
    while place < len(text) and not (in_list and text[place] == "]"):
        value, end = read_value(text, place, line=first)
        line, counted = line + text.count("\n", counted, place), place
        yield line, _row(value, line)
        place = skip_blank(text, end)
        if in_list and text[place : place + 1] == ",":
            place = skip_blank(text, place + 1)
            if text[place : place + 1] != "]":
                continue
            raise RowError(line, "is the last row of the list, and a comma stands behind it")
        if in_list and text[place : place + 1] != "]":
            raise RowError(line, "is not followed by a comma or the end of the list")
    if in_list and skip_blank(text, place + 1) < len(text):
        raise RowError(line, "is the last row of the list, and something stands behind the list")


def _row(value: Any, line: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = {list: "a list", str: "text", bool: "true or false", type(None): "null"}.get(type(value), "a number")
        raise RowError(line, f"is {kind}, and a row is an object with a key for each column", "Write {...} in each row")
    return value
