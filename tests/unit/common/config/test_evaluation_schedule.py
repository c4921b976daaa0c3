"""The version that is overdue for its evaluation after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.common.config.loading import parse_config
from gspo.common.evaluation_schedule import overdue


@pytest.mark.parametrize(
    ("version", "recorded", "expected"),
    [
        (0, (), 0),
        (9, ("v0/a", "v0/b"), 0),
        (10, (), 10),
        (11, ("v0/a", "v0/b"), 10),
        (11, ("v10/a",), 10),
        (11, ("v10/a", "v10/b"), 0),
        (15, ("v11/a", "v11/b"), 0),  # it stood in for version 10
        (25, ("v10/a", "v10/b"), 20),
        (30, ("v20/a", "v20/b"), 0),  # the last of the run is measured at its end
        (30, ("v10/a", "v10/b"), 20),
    ],
)
def test_the_last_version_without_all_its_figures(version: int, recorded: tuple[str, ...], expected: int) -> None:
    config = parse_config(
        {
            "name": "small",
            "model": {"path": "."},
            "data": {"prompts": "p.jsonl"},
            "reward": {"functions": [{"path": "r.py"}]},
            "evaluation": {"prompts": {"a": "a.jsonl", "b": "b.jsonl"}, "every": 10},
            "run": {"total_steps": 30},
        },
        Path(),
    )
    assert overdue(config, version, recorded) == expected
