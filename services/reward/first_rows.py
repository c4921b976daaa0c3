"""The first rows of a data set, for a trial of the reward functions.

It is not how prompts are loaded and checked: the coordinator does that. Neighbour: check.py.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from gspo_proto.rollout_pb2 import Prompt
from services.common.errors import InputError, nearest

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def read_first_rows(path: Path, count: int, key: str) -> list[dict[str, Any]]:
    """The first `count` rows of a file or folder, or fewer where there are not so many; `key` is named in errors.

    Raises:
        InputError: There is nothing that can be read.
    """
    import datasets  # takes a second: only a check needs it

    if not path.exists():
        raise InputError(key, f"{path} does not exist", "Mend the path")
    if path.is_dir():
        given: dict[str, Any] = {"path": str(path)}
    elif path.suffix in FORMATS:
        given = {"path": FORMATS[path.suffix], "data_files": str(path)}
    else:
        raise InputError(key, f"{path} is of no known form", f"Give one of {', '.join(FORMATS)}, or a folder")
    try:
        rows = list(itertools.islice(datasets.load_dataset(**given, split="train", streaming=True), count))
    except (datasets.exceptions.DatasetsError, ValueError, OSError, StopIteration) as error:
        reason = str(error.__cause__ or error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(key, f"{path} cannot be read: {reason}", "Mend the file") from error
    if not rows:
        raise InputError(key, f"{path} has no rows", "Give at least one prompt")
    return rows


def prompt_of(row: dict[str, Any], prompt_column: str, where: str) -> Prompt:
    """A row as a prompt without token ids: its other columns are what reward functions see.

    Raises:
        InputError: There is no such column.
    """
    if prompt_column not in row:
        raise InputError("data.prompt_column", f"{where} has no column '{prompt_column}'", nearest(prompt_column, row))
    prompt = row[prompt_column]
    columns = {name: value for name, value in row.items() if name != prompt_column}
    text = prompt if isinstance(prompt, str) else ""
    messages = "" if isinstance(prompt, str) else json.dumps(prompt, default=str)
    return Prompt(text=text, messages_json=messages, columns_json=json.dumps(columns, default=str))
