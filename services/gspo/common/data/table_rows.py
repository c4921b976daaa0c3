"""Rows of Parquet files and of Arrow tables. Typed columns keep their types where JSON has them.

A table gives every struct all keys that any row has: a key without a value is not data, and is left out. A null column
of a row stays null. Dates, times and decimals become their text. Bytes have no form in JSON: a caller asks for base64
by column, otherwise they are left out.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.common.data.strict_json import RowError, read_text

if TYPE_CHECKING:
    import pyarrow as pa

# Rows that are decoded at a time: a row may hold megabytes.
_BATCH = 256
_Convert = Callable[[Any], Any]


class TableColumns:
    """How the columns of a table become JSON values.

    Args:
        as_base64: Columns whose bytes become text.

    Raises:
        ValueError: Two columns have one name.

    Attributes:
        bytes: Column with bytes -> "images" (or sounds: a file's bytes with its path) or "bytes".
        names: The columns that become values.
    """

    def __init__(self, schema: pa.Schema, as_base64: Collection[str]) -> None:
        self.bytes: dict[str, str] = {}
        self._converts: dict[str, _Convert] = {}
        for field in schema:
            if field.name in self._converts or field.name in self.bytes:
                raise ValueError(f"two columns have the name '{field.name}'")
            if _has_bytes(field.type):
                self.bytes[field.name] = "images" if _has_media(field.type) else "bytes"
            has_bytes = field.name not in as_base64 and field.name in self.bytes
            if not (has_bytes and _is_bytes_alone(field.type)):
                self._converts[field.name] = _converter(field.type, keeps_bytes=not has_bytes)
        self.names = list(self._converts)

    def rows(self, batch: pa.RecordBatch | pa.Table, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows of a part of the table, with their numbers.

        Args:
            first: Number of the first one.

        Raises:
            RowError: A value cannot be read; names row and column.
        """
        columns = {name: self._values(batch.column(name), name, first) for name in self.names}
        for place in range(batch.num_rows):
            yield first + place, {name: values[place] for name, values in columns.items()}

    def _values(self, column: Any, name: str, first: int) -> list[Any]:
        convert = self._converts[name]
        try:
            return [convert(value) for value in column.to_pylist()]
        except (ValueError, OverflowError, TypeError, KeyError):
            for place in range(len(column)):  # find the invalid one
                try:
                    convert(column[place].as_py())
                except (ValueError, OverflowError, TypeError, KeyError) as error:
                    reason = error.reason if isinstance(error, RowError) else str(error)
                    raise RowError(first + place, f"column '{name}' cannot be read ({reason})") from error
            raise


def parquet_rows(path: Path, as_base64: Collection[str], note: Callable[[str, str], None]) -> Iterator[tuple[int, Any]]:
    """The rows of a Parquet file, from 1.

    Args:
        note: Called with each column that has bytes, and what they are.

    Raises:
        RowError: A value cannot be read.
        OSError, ValueError: The file cannot be read.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        columns = TableColumns(file.schema_arrow, as_base64)
        for name, kind in columns.bytes.items():
            note(name, kind)
        yield from _numbered(file.iter_batches(_BATCH, columns=columns.names), columns)


def dataset_rows(dataset: Any, as_base64: Collection[str], note: Callable[[str, str], None]) -> Iterator[Any]:
    """The rows of a `datasets.Dataset`, as `parquet_rows`."""
    columns = TableColumns(dataset.features.arrow_schema, as_base64)
    for name, kind in columns.bytes.items():
        note(name, kind)
    tables = dataset.select_columns(columns.names).with_format("arrow")
    yield from _numbered(tables.iter(_BATCH), columns)


def _numbered(batches: Iterable[Any], columns: TableColumns) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa

    first = 1
    try:
        for batch in batches:
            yield from columns.rows(batch, first)
            first += batch.num_rows
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error


def _inner(kind: pa.DataType) -> list[pa.DataType]:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return [kind.storage_type]
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return [kind.value_type]
    return [kind.field(place).type for place in range(kind.num_fields)]


def _is_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def _has_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if isinstance(kind, pa.UuidType):
        return False
    return _is_bytes(kind) or any(map(_has_bytes, _inner(kind)))


def _is_file(kind: pa.DataType) -> bool:
    """Whether it is the struct in which `datasets` keeps an image, a sound or a video."""
    import pyarrow as pa

    return pa.types.is_struct(kind) and {kind.field(i).name for i in range(kind.num_fields)} == {"bytes", "path"}


def _has_media(kind: pa.DataType) -> bool:
    return _is_file(kind) or any(map(_has_media, _inner(kind)))


def _is_bytes_alone(kind: pa.DataType) -> bool:
    """Whether nothing is left of a value without its bytes."""
    import pyarrow as pa

    if _is_bytes(kind) or _is_file(kind):
        return True
    return not pa.types.is_struct(kind) and bool(_inner(kind)) and all(map(_is_bytes_alone, _inner(kind)))


def _converter(kind: pa.DataType, *, keeps_bytes: bool) -> _Convert:
    """The function that makes a JSON value of a Python value of a type."""
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.JsonType):
        return lambda value: None if value is None else read_text(value)
    if isinstance(kind, pa.UuidType):
        return lambda value: None if value is None else str(value)
    if types.is_map(kind):
        return _of_map(_converter(kind.item_type, keeps_bytes=keeps_bytes))
    if types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return _of_struct(
            {
                field.name: _converter(field.type, keeps_bytes=keeps_bytes)
                for field in fields
                if keeps_bytes or not (_is_bytes_alone(field.type))
            }
        )
    if _is_bytes(kind):
        return lambda value: None if value is None else b64encode(value).decode()
    inner = _inner(kind)
    if inner and (
        types.is_dictionary(kind) or types.is_run_end_encoded(kind) or isinstance(kind, pa.BaseExtensionType)
    ):
        return _converter(inner[0], keeps_bytes=keeps_bytes)
    if inner:
        return _of_list(_converter(inner[0], keeps_bytes=keeps_bytes))
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_null(kind):
        return lambda value: value
    if types.is_floating(kind):
        return lambda value: None if value is None else float(value)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return lambda value: value
    return lambda value: None if value is None else str(value)


def _of_struct(converts: dict[str, _Convert]) -> _Convert:
    def convert(value: Any) -> Any:
        if value is None:
            return None
        members = ((name, converts[name](member)) for name, member in value.items() if name in converts)
        return {name: member for name, member in members if member is not None}

    return convert


def _of_list(convert: _Convert) -> _Convert:
    return lambda values: None if values is None else [convert(value) for value in values]


def _of_map(convert: _Convert) -> _Convert:
    return lambda pairs: None if pairs is None else {str(key): convert(value) for key, value in pairs}
