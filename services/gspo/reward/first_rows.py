"""The first rows of a data set, for a trial of the reward functions.

It is not how prompts are loaded and checked: the coordinator does that, and its rows reach the functions in a run.
Neighbour: check.py.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gspo.common.errors import InputError, nearest
from gspo_proto.rollout_pb2 import Prompt

_BUILDERS = {".json": "json", ".csv": "csv", ".parquet": "parquet"}
_FORMS = (".jsonl", *_BUILDERS)
# As far as `datasets` looks to learn a JSON file's columns.
_HEAD_BYTES = 10 * 2**20


def read_first_rows(path: Path, count: int, key: str) -> list[dict[str, Any]]:
    """The first `count` rows of a file or folder, or fewer where there are not so many; `key` is named in errors.

    Raises:
        InputError: There is nothing that can be read.
    """
    if not path.exists():
        raise InputError(key, f"{path} does not exist", "Give the path of a file of prompts")
    if path.is_file() and path.suffix.lower() not in _FORMS:
        fix = "Convert it, or give a folder that `datasets` opens"
        raise InputError(key, f"{path} is none of {', '.join(_FORMS)}", fix)
    try:
        # JSON lines are read here: the import of `datasets` would be half of the check's time.
        lines = path.is_file() and path.suffix.lower() == ".jsonl"
        rows = _read_lines(path, count) if lines else _read_with_datasets(path, count)
    except (ValueError, OSError, StopIteration) as error:
        reason = (str(error.__cause__ or error) or "it is empty").splitlines()[0]
        raise InputError(key, f"{path} cannot be read ({reason})", "Mend the file") from error
    if not rows:
        raise InputError(key, f"{path} has no rows", "Give a file with at least one prompt")
    return rows


def _read_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file; a column that a row leaves out is None in it."""
    rows: list[dict[str, Any]] = []
    names: dict[str, None] = {}
    num_bytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is not an object")
                names |= dict.fromkeys(row)
                rows += [row] if len(rows) < count else []
            num_bytes += len(line)
            if num_bytes > _HEAD_BYTES:
                break
    return [{name: row.get(name) for name in names} for row in rows]


def _read_with_datasets(path: Path, count: int) -> list[dict[str, Any]]:
    """Rows of whatever `datasets` opens; of several splits, those of the training split."""
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read at import: files here need no hub
    import datasets

    datasets.disable_progress_bars()
    try:
        if path.is_file():
            given = {"path": _BUILDERS[path.suffix.lower()], "data_files": str(path)}
            opened = datasets.load_dataset(**given, split="train", streaming=True)
        elif any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
            opened = datasets.load_from_disk(str(path))
        else:
            opened = datasets.load_dataset(str(path), streaming=True)
        if isinstance(opened, dict):
            opened = opened["train"] if "train" in opened else next(iter(opened.values()))
        rows: Iterable[dict[str, Any]] = itertools.islice(opened, count)
        return list(rows)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(str(error)) from error


def prompt_of(row: dict[str, Any], prompt_column: str, where: str) -> Prompt:
    """A row as a prompt without token ids: its other columns are what reward functions see.

    Raises:
        InputError: There is no such column.
    """
    if prompt_column not in row:
        fix = f"Set data.prompt_column. {nearest(prompt_column, row)}"
        raise InputError("data.prompt_column", f"{where} has no column '{prompt_column}'", fix)
    prompt = row[prompt_column]
    columns = {name: value for name, value in row.items() if name != prompt_column}
    text = prompt if isinstance(prompt, str) else ""
    messages = "" if isinstance(prompt, str) else json.dumps(prompt, default=str)
    return Prompt(text=text, messages_json=messages, columns_json=json.dumps(columns, default=str))
