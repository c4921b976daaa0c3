"""The rows of a page that a program makes, between a comment that names it and a comment at their end."""

from __future__ import annotations

from pathlib import Path

_END = "<!-- end of rows -->"


def replace_rows(page: Path, begin: str, rows: str) -> None:
    """Write a page with other rows behind the comment `begin`; the rest of it stays."""
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{rows}\n{_END}{rest.split(_END)[1]}")
