"""Tables in Markdown. It measures and computes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

Column = tuple[str, Iterable[Any], str]  # header, values, and the format specification of each value


def table(*columns: Column) -> str:
    """A Markdown table; a missing value is a dash, and all columns but the first lean to the right."""
    cells = [[shown(value, style) for value in values] for _, values, style in columns]
    header = [header for header, _, _ in columns]
    lines = [header, ["---", *["---:"] * (len(columns) - 1)], *zip(*cells, strict=True)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: Any, style: str) -> str:
    """A value by its format specification; a dash for None and NaN."""
    return "-" if pd.isna(value) else format(value, style)


def side_by_side(*columns: tuple[Iterable[Any], str], separator: str = ", ") -> list[str]:
    """The cells of a column that shows several values: (values, format specification) of each."""
    cells = [[shown(value, style) for value in values] for values, style in columns]
    return [separator.join(parts) for parts in zip(*cells, strict=True)]
