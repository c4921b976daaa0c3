"""`gspo config`: prints the keys of a configuration with type, default, bounds and meaning, as a list or Markdown."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gspo.common.config.reference import Key, explain, item_keys
from gspo.common.errors import InputError, nearest


def select_keys(prefix: str) -> list[Key]:
    """The key of that name, or the keys of that section; all for an empty name.

    Raises:
        InputError: There is no such key.
    """
    known: list[Key] = []  # each section is followed by the keys of one item of its lists
    for _, section in groupby(explain(), key=_section):
        keys = list(section)
        known += [*keys, *(item for key in keys for item in item_keys(key))]
    selected = [key for key in known if not prefix or key.name == prefix or key.name.startswith(f"{prefix}.")]
    if not selected:
        names = {key.name for key in known} | {key.name.split(".")[0] for key in known}
        raise InputError(prefix, "is not a key", nearest(prefix, names))
    return selected


def _section(key: Key) -> str:
    return key.name.rpartition(".")[0]


def print_keys(prefix: str, console: Console) -> None:
    """Print each key with its meaning below; into a pipe a line each, so that `grep` shows all of it."""
    for key in select_keys(prefix):
        resume = "may change on resume" if key.on_resume else "fixed"
        facts = f"{_kind(key)}; default {key.default}; {resume}"
        if not console.is_terminal:
            console.print(Text(f"{key.name}  {facts}  {key.meaning}"), soft_wrap=True)
            continue
        console.print(Text.assemble((key.name, "bold cyan"), "  ", (facts, "dim")), overflow="fold")
        console.print(Padding(Text(key.meaning), (0, 0, 1, 4)))


def _kind(key: Key) -> str:
    return f"{key.type}, {key.bounds}" if key.bounds else key.type


def markdown(prefix: str) -> str:
    """The keys as Markdown, a table for each section."""
    parts = []
    for section, keys in groupby(select_keys(prefix), key=_section):
        parts.append(
            f"## {section or 'The run'}\n\n| key | type | default | on resume | meaning |\n|---|---|---|---|---|"
        )
        for key in keys:
            changes = "may change" if key.on_resume else "fixed"
            cells = (f"`{key.name}`", _kind(key), f"`{key.default}`", changes, key.meaning)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)
