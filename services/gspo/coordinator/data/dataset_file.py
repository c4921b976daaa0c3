"""Opens a file of prompts of any format with `datasets`, which maps the file and loads no rows into memory.

prompts.py checks the rows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from gspo.common.errors import InputError, nearest

if TYPE_CHECKING:
    from datasets import Dataset

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_TEXT_FORMS = (".jsonl", ".json", ".csv")
_SPLIT = "train"


def open_dataset(key: str, path: Path, column: str, *, column_key: str = "data.prompt_column") -> Dataset:
    """The rows of a file, or of a folder that `datasets` wrote or can open.

    Args:
        key: The configuration key that names the file, for messages.
        column: A column that must be there.
        column_key: The key that names it, for messages.

    Raises:
        InputError: The file is missing, empty, unreadable or of an unknown format, or has no such column.
    """
    if not path.exists():
        raise InputError(key, f"{path} does not exist", "Give the path of a file of prompts")
    if path.is_file() and path.suffix.lower() in _TEXT_FORMS:
        _check_text(key, path)
    rows = _open(key, path)
    if not len(rows):
        raise _no_rows(key, path)
    if column not in rows.column_names:
        fix = f"Set {column_key}. {nearest(column, rows.column_names)}"
        raise InputError(column_key, f"{path} has no column '{column}'", fix)
    return rows


def _open(key: str, path: Path) -> Dataset:
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read at import: files here need no hub
    import datasets
    from datasets.exceptions import DatasetsError

    datasets.disable_progress_bars()
    try:
        if path.is_dir():
            return _training_split(key, path, _open_folder(path))
        builder = _BUILDERS.get(path.suffix.lower())
        if builder is None:
            formats = ", ".join(_BUILDERS)
            raise InputError(key, f"{path} is none of {formats}", "Convert it, or give a folder that `datasets` opens")
        return datasets.load_dataset(builder, data_files=str(path), split=_SPLIT)
    except (DatasetsError, OSError, ValueError, StopIteration) as error:
        reason = _broken_line(path) or _first_cause(error)
        raise InputError(key, f"{path} cannot be read ({reason})", "Correct the file") from error


def _check_text(key: str, path: Path) -> None:
    """Refuse binary and blank files, which `datasets` refuses later or without naming a line.

    Raises:
        InputError: Names the first line that is not UTF-8.
    """
    blank = True
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                blank &= not line.decode().strip()
            except UnicodeDecodeError as error:
                raise InputError(key, f"{path}, line {number}: is not UTF-8 ({error})", "Save it as UTF-8") from error
    if blank:
        raise _no_rows(key, path)


def _no_rows(key: str, path: Path) -> InputError:
    return InputError(key, f"{path} has no rows", "Give a file with at least one prompt")


def _broken_line(path: Path) -> str:
    """The error of the first line of a JSON Lines file that is not JSON; empty for other files."""
    if path.suffix.lower() != ".jsonl":
        return ""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                json.loads(line.strip() or b"null")
            except ValueError as error:
                return f"line {number} is not JSON: {error}"
    return ""


def _open_folder(path: Path) -> Dataset:
    import datasets

    saved = any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    return datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))


def _training_split(key: str, path: Path, opened: Dataset) -> Dataset:
    """The training split where there are several, the only one where there is one."""
    if not hasattr(opened, "keys"):
        return opened
    names = list(opened.keys())
    if _SPLIT not in names and len(names) != 1:
        fix = f"Save one split alone with save_to_disk, or name it '{_SPLIT}'"
        raise InputError(key, f"{path} has the splits {', '.join(names)} and none is '{_SPLIT}'", fix)
    return opened[_SPLIT if _SPLIT in names else names[0]]


def _first_cause(error: BaseException) -> str:
    """The innermost message: `datasets` wraps the error of the format's reader."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else "it is empty"
