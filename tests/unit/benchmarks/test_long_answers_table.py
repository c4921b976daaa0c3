"""The table of long tails, from made-up results worked by hand; and the ideal that it is held against."""

from __future__ import annotations

import pytest

from benchmarks.tails.long_answers import alone
from benchmarks.tails.long_answers_table import facts, tail

CASE = {
    "label": "max_lag 1",
    "alone": {"generation": 4000.0, "training": 5000.0},
    "ideal_tokens_per_s": 4000.0,
    "tokens_per_s": 3000.0,
    "masked_share": 0.02,
    "age_mean": 0.75,
    "age_max": 4.0,
    "shares": {"train": 0.6, "wait": 0.35, "wait_old": 0.25, "log": 0.03, "publish": 0.02},
    "answer_tokens": {"median": 64, "mean": 105.0, "max": 1280},
    "versions_mean": 1.5,
}


def test_a_row_is_compared_with_the_ideal() -> None:
    assert tail([CASE]).splitlines()[2] == (
        "| max_lag 1 | 3,000 | 75% | 60% | 35% | 25% | 5% | 2% | 0.8, 4 | 105, 1,280 | 1.5 |"
    )
    assert tail([{**CASE, "ideal_tokens_per_s": None}]).splitlines()[2].startswith("| max_lag 1 | 3,000 | - |")
    assert facts([CASE]) == {"generation": "4,000", "training": "5,000", "ideal": "4,000"}


def test_the_ideal_follows_from_the_settings() -> None:
    """64 requests take 10 + 6.4 ms a step; training takes nine tenths of that for the same 64 tokens."""
    assert alone() == pytest.approx({"generation": 64 / 0.0164, "training": 64 / 0.01476})
