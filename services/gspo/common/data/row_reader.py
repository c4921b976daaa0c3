"""The reader of data files: rows as the files say, for checks, trials, the doctor and the run alike.

It opens JSON Lines, JSON, CSV, Parquet, and folders that `datasets` wrote or can open. Files in such a folder that have
one of these forms are read here too, so that a value never depends on the way to it.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspo.common.config.fields import ColumnType
from gspo.common.data.column_types import as_type
from gspo.common.data.strict_json import RowError
from gspo.common.data.table_rows import dataset_rows, parquet_rows
from gspo.common.data.text_rows import csv_rows, json_rows
from gspo.common.errors import InputError, in_yaml

_TEXT_ROWS = {".jsonl": json_rows, ".json": json_rows, ".csv": csv_rows}
_FORMATS = (*_TEXT_ROWS, ".parquet")
_SPLIT = "train"
# First bytes -> what such a file is, the end of its name, and what helps.
_BEGINNINGS = {
    b"\x1f\x8b": ("gzip", ".gz", "Name it {name}.gz, if its text is what the name says"),
    b"PAR1": ("Parquet", ".parquet", "Let its name end in .parquet"),
    b"PK\x03\x04": ("a zip archive or an Excel workbook", ".zip", "Unpack it, or save the sheet as CSV in UTF-8"),
    b"\x28\xb5\x2f\xfd": ("zstd", ".zst", "Unpack it: zstd -d"),
    b"BZh": ("bzip2", ".bz2", "Unpack it: bzip2 -d"),
    b"\xfd7zXZ\0": ("xz", ".xz", "Unpack it: xz -d"),
    b"ARROW1": ("Arrow", ".arrow", "Give the folder that `datasets` wrote, or save it as Parquet"),
}


class DataRow(NamedTuple):
    """A row of a data file.

    Attributes:
        file: The file and the name of its parts, such as "prompts.jsonl, line".
        number: Its line or row, from 1.
        columns: Name -> value of JSON's kinds.
    """

    file: str
    number: int
    columns: dict[str, Any]

    @property
    def place(self) -> str:
        """Its file and line, such as "prompts.jsonl, line 3"."""
        return f"{self.file} {self.number}"


class RowReader:
    """The rows of one or several files, in order; each iteration reads them anew.

    Args:
        key: The configuration key that names the files, for messages.
        types: Column -> type, for columns whose values are read otherwise than the files have them.
        types_key: Where the configuration has them, for messages.

    Attributes:
        left_out: Columns whose bytes have been left out so far -> "images" or "bytes".
        unused_types: Columns with a type that no row so far has, or that have no bytes for base64.
    """

    def __init__(
        self,
        key: str,
        paths: Sequence[Path],
        types: Mapping[str, ColumnType] | None = None,
        *,
        types_key: str = "data.types",
    ) -> None:
        self._key, self._paths, self._types, self._types_key = key, paths, dict(types or {}), types_key
        self.left_out: dict[str, str] = {}
        self.unused_types = set(self._types)

    def __iter__(self) -> Iterator[DataRow]:
        """Read the rows.

        Raises:
            InputError: A file is missing, of an unknown form, or has something that cannot be read. Names key and file,
                and line, column and value where there are any.
        """
        is_empty = True
        for path in self._paths:
            for row in self._file(path):
                is_empty = False
                yield row
        if is_empty:
            names = ", ".join(map(str, self._paths))
            raise InputError(self._key, f"{names} has no rows", "Give a file with at least one prompt")

    def _file(self, path: Path) -> Iterator[DataRow]:
        if not path.exists():
            fix = "Give the path of a file of prompts"
            if not path.suffix:  # perhaps a name on a hub
                fix += "; datasets.load_dataset(NAME, split='train').to_parquet(FILE) makes one of a hub's data set"
            raise InputError(self._key, f"{path} does not exist", fix)
        try:
            if path.is_dir():
                yield from self._folder(path)
                return
            form = _form(path)
            if form not in _FORMATS:
                rule = f"{path} is none of {', '.join(_FORMATS)}"
                raise InputError(self._key, rule, "Convert it, or give a folder that `datasets` opens")
            yield from self._typed(path, form)
        except (OSError, ValueError, EOFError, zlib.error) as error:  # the last two: of a damaged .gz
            raise InputError(self._key, f"{path} cannot be read ({_first_cause(error)})", "Correct the file") from error

    def _typed(self, path: Path, form: str) -> Iterator[DataRow]:
        """The rows of one file of a known form.

        Raises:
            InputError: It begins as a file of another one.
        """
        with path.open("rb") as file:
            head = file.read(8)
        expected = ".gz" if path.suffix.lower() == ".gz" else form
        for start, (kind, name, fix) in _BEGINNINGS.items():
            if head.startswith(start) and name != expected:
                raise InputError(self._key, f"{path} is {kind} by its first bytes", fix.format(name=path.name))
        if form in _TEXT_ROWS:
            return self._placed(path, "line", _TEXT_ROWS[form](path))
        return self._placed(path, "row", parquet_rows(path, self._as_base64, self._note))

    def _placed(self, path: Path, word: str, rows: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[DataRow]:
        try:
            for number, columns in rows:
                row = DataRow(f"{path}, {word}", number, columns)
                self._set_types(row)
                yield row
        except RowError as error:
            place = error.in_line(f"{path}, {word} {error.number}")
            raise InputError(self._key, f"{place}: {error.reason}", error.fix) from error

    def _set_types(self, row: DataRow) -> None:
        columns = row.columns
        for name, kind in self._types.items():
            if name not in columns:
                continue
            if kind != "base64":  # base64 is for bytes alone: _note
                self.unused_types.discard(name)
            if kind == "omit":
                del columns[name]
                continue
            try:
                columns[name] = as_type(columns[name], kind)
            except ValueError as error:
                rule = f"{row.place}: column '{name}' {error}: {in_yaml(columns[name]):.80}"
                raise InputError(self._key, rule, f"Correct it, or set {self._types_key}.{name}: text") from error

    @property
    def _as_base64(self) -> list[str]:
        return [name for name, kind in self._types.items() if kind == "base64"]

    def _note(self, column: str, kind: str) -> None:
        self.unused_types.discard(column)
        if self._types.get(column) not in ("omit", "base64"):
            self.left_out[column] = kind

    def _folder(self, path: Path) -> Iterator[DataRow]:
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read at import: files here need no hub
        import datasets

        datasets.disable_progress_bars()
        if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            saved = _opened(datasets.load_from_disk, path)
            split = self._split(path, saved) if isinstance(saved, Mapping) else None
            rows = dataset_rows(saved if split is None else saved[split], self._as_base64, self._note)
            yield from self._placed(path, "row", rows)
            return
        builder = _opened(datasets.load_dataset_builder, path)
        files = builder.config.data_files
        split = self._split(path, files)
        own = [Path(file) for file in files[split]]
        if all(_form(file) in _FORMATS for file in own):
            for file in own:
                yield from self._typed(file, _form(file))
            return
        opened = _opened(datasets.load_dataset, path, split=split)
        yield from self._placed(path, "row", dataset_rows(opened, self._as_base64, self._note))

    def _split(self, path: Path, splits: Mapping[Any, Any]) -> str:
        """The training split where there are several, the only one where there is one."""
        names = list(map(str, splits))
        if _SPLIT not in names and len(names) != 1:
            fix = f"Save one split alone with save_to_disk, or name it '{_SPLIT}'"
            raise InputError(self._key, f"{path} has the splits {', '.join(names)} and none is '{_SPLIT}'", fix)
        return _SPLIT if _SPLIT in names else names[0]


def _opened(load: Callable[..., Any], path: Path, **options: Any) -> Any:
    """A folder, opened by a function of `datasets`.

    Raises:
        ValueError: It cannot.
    """
    try:
        return load(str(path), **options)
    except Exception as error:  # a folder's content decides the class
        raise ValueError(_first_cause(error)) from error


def _form(path: Path) -> str:
    """The form of a file by its name; a compressed text has that of its content."""
    suffix, inner = path.suffix.lower(), Path(path.stem).suffix.lower()
    return inner if suffix == ".gz" and inner in _TEXT_ROWS else suffix


def _first_cause(error: BaseException) -> str:
    """The innermost message: `datasets` wraps the error of the format's reader."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else "it is empty"
