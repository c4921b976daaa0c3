"""Names and columns of the step files: `log/step-000001.parquet` holds the rollouts of step 1 in training order.

log/tokens-000001.parquet holds figures of its tokens by the learner, if the run keeps them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_NAME = re.compile(r"step-(\d{6,})\.parquet")


def step_file(log_folder: Path, step: int) -> Path:
    """The path of the file of a step, existing or not."""
    return log_folder / f"step-{step:06d}.parquet"


def token_file(log_folder: Path, step: int) -> Path:
    """The path of the file of a step's token records (learner.token_records), existing or not."""
    return log_folder / f"tokens-{step:06d}.parquet"


def step_files(log_folder: Path) -> dict[int, Path]:
    """The files of the logged steps by step, in order; empty where the folder is missing."""
    if not log_folder.is_dir():
        return {}
    files = {int(match[1]): path for path in log_folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(files.items()))


def read_columns(path: Path, names: Sequence[str]) -> pa.Table:
    """Some columns of a step file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a Parquet file, or lacks a column.
    """
    import pyarrow as pa  # a third of a second, which processes that only read records do not spend
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if missing := set(names) - set(file.schema_arrow.names):
                raise ValueError(f"{path.name} has no column {', '.join(sorted(missing))}")
            return file.read(columns=list(names))
    except pa.ArrowException as error:
        raise ValueError(f"{path.name} is not a step file: {error}") from error


def column(path: Path, name: str) -> list[Any]:
    """One column of a step file, a value a rollout.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a Parquet file, or lacks the column.
    """
    return list(read_columns(path, [name]).column(name).to_pylist())
