"""Columns that a function reads in silence, by its text."""

from __future__ import annotations

import pytest

from gspo.reward.functions.column_reads import silent_columns


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ("def score(completions, **columns):\n    return columns.get('answer')", ["answer"]),
        (
            "def score(completions, **kwargs):\n    a = kwargs.pop('answer', [0])\n    return kwargs.get('task')",
            ["answer"],
        ),
        ("def score(completions, **columns):\n    return columns.get('answer') or columns.get('task')", []),
        ("def score(completions, **columns):\n    return columns.get('answer', columns.get('task'))", []),
        ("def score(completions, **columns):\n    return columns.get('a') or columns.get('b') or 0", ["a", "b"]),
        ("def score(completions, answer=None, task=None, weight=1.0): ...", ["answer"]),
        ("def score(completions, *, answer=None, weight): ...", ["answer"]),
        (
            "async def score(completions, **columns):\n    return [columns.get('answer') for _ in completions]",
            ["answer"],
        ),
        # Other mappings, names that are computed, and a missing key that raises, which the trial shows.
        ("def score(completions, **columns):\n    return completions[0].get('x'), columns.get(key), columns['y']", []),
        ("from elsewhere import score", []),
    ],
)
def test_a_read_without_its_column_is_seen(body: str, missing: list[str]) -> None:
    assert silent_columns(body, "score", {"task", "label"}) == missing
