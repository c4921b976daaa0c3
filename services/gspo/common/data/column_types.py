"""The types that a user gives to columns (data.types), and what they make of a value."""

import json
import math
import re
from typing import Any

from gspo.common.config.fields import ColumnType
from gspo.common.data.strict_json import RowError, read_text

_WHOLE = re.compile(r"[+-]?[0-9]{1,4000}")


def as_type(value: Any, kind: ColumnType) -> Any:
    """The value of a row's column as the type.

    Numbers, booleans and JSON are read from text, and empty text becomes None.

    Raises:
        ValueError: The value is none of the type; says why.
    """
    if value is None or (value == "" and kind in ("number", "boolean", "json")):
        return None
    match kind:
        case "text":
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        case "number":
            return _number(value)
        case "boolean":
            return _boolean(value)
        case "json":
            return _json(value)
    return value


def _number(value: Any) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise ValueError("is no number")
    if _WHOLE.fullmatch(text := value.strip()):
        return int(text)
    try:
        number = float(text) if "_" not in text else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("is no number")
    return number


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or (word := value.strip().lower()) not in ("true", "false"):
        raise ValueError("is neither true nor false")
    return word == "true"


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return read_text(value)
    except RowError as error:
        raise ValueError(error.reason) from error
