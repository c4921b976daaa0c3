"""The unbiased estimate of the best of k, by hand and against every draw."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest

from gspo.coordinator.evaluation.figures import best_of


@pytest.mark.parametrize(
    ("passed", "k", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], 1, 0.25),
        ([1.0, 0.0, 0.0, 0.0], 2, 0.5),  # 3 of the 6 pairs hold it
        ([0.0, 1.0, 1.0, 0.0], 2, 5 / 6),  # one pair of the 6 misses both
        ([0.0, 0.0], 2, 0.0),
    ],
)
def test_of_passes_it_is_the_share_of_draws_with_one(passed: list[float], k: int, expected: float) -> None:
    assert best_of(passed, k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_it_is_the_mean_over_every_draw(k: int) -> None:
    rewards = [0.5, -1.0, 2.0, 0.5, 0.25]
    assert best_of(rewards, k) == pytest.approx(fmean(max(draw) for draw in combinations(rewards, k)))


def test_many_answers_are_no_trouble() -> None:
    assert best_of([1.0] + [0.0] * 999, 500) == pytest.approx(0.5)
