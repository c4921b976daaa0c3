"""The learning rate of every step, against numbers worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.learner.training.trainer_api import learning_rate
from tests.support.training.rollout_rows import make_config


def rates(tmp_path: Path, steps: int, total_steps: int | None = None, **learner: Any) -> list[float]:
    """Rates of the steps from 1, with a peak of 1."""
    section = make_config(tmp_path, learner={"learning_rate": 1.0, **learner}).learner
    return [learning_rate(section, step, total_steps) for step in range(1, steps + 1)]


def test_it_rises_in_equal_parts_and_reaches_the_peak_after_the_warm_up(tmp_path: Path) -> None:
    assert rates(tmp_path, 6, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(tmp_path, 2) == [1.0, 1.0]


def test_a_linear_fall_ends_after_the_last_step(tmp_path: Path) -> None:
    assert rates(tmp_path, 5, 5, schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(tmp_path, 6, 6, schedule="linear", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25])


def test_a_cosine_falls_slowly_at_both_ends(tmp_path: Path) -> None:
    # (1 + cos 0) / 2, of 45, 90 and 135 degrees.
    assert rates(tmp_path, 4, 4, schedule="cosine") == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])


@pytest.mark.parametrize(("schedule", "last"), [("linear", 0.25), ("cosine", 0.1464466)])
def test_beyond_the_last_step_the_last_rate_stays(tmp_path: Path, schedule: str, last: float) -> None:
    assert rates(tmp_path, 7, 4, schedule=schedule)[3:] == pytest.approx([last] * 4)
