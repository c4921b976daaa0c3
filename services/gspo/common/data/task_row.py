"""The parts of a row in a task: the prompt, and the columns that rewards, environments and agents see."""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from gspo.common.chat_messages import RESERVED_VARIABLES
from gspo.common.config.sources import Source
from gspo.common.errors import InputError, in_yaml, nearest

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
    for key, column in (
        (source.key("prompt_column"), source.prompt_column),
        (source.key("answer_column"), source.answer_column),
    ):
        if column is not None and column not in names:
            raise InputError(key, f"{where} has no column '{column}'", f"Set {key}. {nearest(column, names)}")


def template_variables(columns: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Variables of the chat template in the prompt of a row.

    They are those of the source, then those of the row's column `chat_template_kwargs`, and the tools of the
    environment or of the row's column `tools`. Both columns are TRL's; either may be JSON text.

    Raises:
        ValueError: A column has another form, or there are tools of two origins.
    """
    of_row = _json_column(columns, "chat_template_kwargs", dict) or {}
    if reserved := sorted(of_row.keys() & RESERVED_VARIABLES):
        raise ValueError(f"chat_template_kwargs has {reserved[0]}, which is not a variable of the template")
    tools = _json_column(columns, "tools", list)
    own = list(source.environment.descriptions)
    if tools and own:
        raise ValueError(
            f"the column tools describes other tools than {source.key('environment')}, which carries them out"
        )
    return {**source.chat_template_kwargs, **of_row, **({"tools": tools or own} if tools or own else {})}


def _json_column(columns: Mapping[str, Any], name: str, kind: type) -> Any:
    value = columns.get(name)
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if value is not None and not isinstance(value, kind):
        form = "a list of tool descriptions" if kind is list else "a mapping"
        raise ValueError(f"the column {name} is not {form}: {in_yaml(value):.80}")
    return value


def split_row(columns: dict[str, Any], source: Source) -> tuple[Any, dict[str, Any]]:
    """The prompt of a row, and its other columns.

    The column that data.answer_column names is there under its own name and as `ground_truth`.
    """
    others = {name: value for name, value in columns.items() if name != source.prompt_column}
    if source.answer_column is not None:
        others[RIGHT_ANSWER] = columns.get(source.answer_column)
    return columns.get(source.prompt_column), others
