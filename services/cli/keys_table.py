"""`gspo config`: every key of a configuration with type, default, bounds and meaning.

The facts come from configfile.py; this only lays them out, as a table or as Markdown for the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.common.config_keys import Key, explain, explain_item
from services.common.errors import InputError, nearest


def select_keys(prefix: str) -> list[Key]:
    """The keys of that name, or under it; all for an empty one.

    Raises:
        InputError: There is none.
    """
    known = list(_all_keys())
    found = [key for key in known if not prefix or key.name == prefix or key.name.startswith(f"{prefix}.")]
    if not found:
        names = {key.name for key in known} | {key.name.split(".")[0] for key in known}
        raise InputError(prefix, "is not a key", nearest(prefix, names))
    return found


def _all_keys() -> Iterator[Key]:
    """Every key, and behind each section the keys of one item of its lists."""
    for _, section in groupby(explain(), key=_section):
        keys = list(section)
        yield from keys
        for key in keys:
            yield from explain_item(key)


def _section(key: Key) -> str:
    return key.name.rpartition(".")[0]


def print_keys(prefix: str, console: Console) -> None:
    """A table for the terminal."""
    table = Table("key", "type", "default", "on resume", "meaning", header_style="bold", box=None, padding=(0, 1))
    for column in table.columns:
        column.overflow = "fold"  # a name with an ellipsis could not be copied from a narrow terminal
    for key in select_keys(prefix):
        kind = f"{key.type}, {key.bounds}" if key.bounds else key.type
        resume = Text("may change", "green") if key.on_resume else Text("fixed", "dim")
        table.add_row(Text(key.name, "bold cyan"), Text(kind), Text(key.default), resume, Text(key.meaning))
    console.print(table)


def markdown(prefix: str) -> str:
    """The same as Markdown, a table for each section."""
    parts = []
    for section, keys in groupby(select_keys(prefix), key=_section):
        parts.append(
            f"## {section or 'The run'}\n\n| key | type | default | on resume | meaning |\n|---|---|---|---|---|"
        )
        parts += [_markdown_row(key) for key in keys]
        parts.append("")
    return "\n".join(parts)


def _markdown_row(key: Key) -> str:
    kind = f"{key.type}, {key.bounds}" if key.bounds else key.type
    cells = (f"`{key.name}`", kind, f"`{key.default}`", "may change" if key.on_resume else "fixed", key.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
