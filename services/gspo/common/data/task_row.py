"""The parts of a row in a task: the prompt, and the columns that rewards, environments and agents see."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gspo.common.config.sources import Source
from gspo.common.errors import InputError, nearest

# The column under which functions of every convention find the right answer.
RIGHT_ANSWER = "ground_truth"


def check_names(names: Collection[str], source: Source, where: str) -> None:
    """Check that data has the columns that its source names.

    Args:
        names: Every column that a row has.
        where: The files, for messages.

    Raises:
        InputError: Names the key, and the nearest column there is.
    """
    for key, column in ((source.column_key, source.prompt_column), (source.answer_key, source.answer_column)):
        if column is not None and column not in names:
            raise InputError(key, f"{where} has no column '{column}'", f"Set {key}. {nearest(column, names)}")


def split_row(columns: dict[str, Any], source: Source) -> tuple[Any, dict[str, Any]]:
    """The prompt of a row, and its other columns.

    The column that data.answer_column names is there under its own name and as `ground_truth`.
    """
    others = {name: value for name, value in columns.items() if name != source.prompt_column}
    if source.answer_column is not None:
        others[RIGHT_ANSWER] = columns.get(source.answer_column)
    return columns.get(source.prompt_column), others
