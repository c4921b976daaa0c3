"""The first answers of recorded runs: faults of reward, template and limit show before the first update."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gspo.common.config.schema import Config
from gspo.common.telemetry.first_answers import FIRST_ANSWERS, first_answers
from tests.planted.judged import configured_run
from tests.support.repository.source_files import ROOT

RUNS: dict[str, Any] = json.loads((ROOT / "tests/planted/figures.json").read_text())
# The words of the finding; None without one.
EXPECTED = {
    "dead_reward": "every answer gets 0",
    "reward_always_1": "every answer gets 1",
    "wrong_end_token": "no answer has an end token",
    "template_without_answer": "94% of the groups have equal rewards",
    "limit_too_short": "97% of the answers are cut off",
    "healthy": None,
    "lag_16": None,
    "rewards_fail": None,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_step_1_of_a_recorded_run(name: str) -> None:
    findings = first_answers(RUNS[name]["steps"][0], configured_run(name))
    words = EXPECTED[name]
    assert [finding.rule for finding in findings] == [FIRST_ANSWERS] * len(findings)
    assert words in " ".join(finding.text for finding in findings) if words else not findings


def test_filtered_groups_count_and_a_source_without_signal_is_named(minimal: dict[str, Any]) -> None:
    config = Config.model_validate(minimal)
    figures = {
        "groups": 4.0,
        "groups_filtered": 36.0,
        "zero_spread_groups": 0.0,
        "reward_mean": 0.5,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "response_tokens_mean": 6.0,
    }
    (weak,) = first_answers(figures, config)
    assert weak.seen.startswith("the 4 groups before the first update (reward 0.5, 6.0 tokens an answer of at most ")
    assert "90% of the groups have equal rewards" in weak.seen
    sources = {
        f"source_{name}/{figure}": value
        for name, equal in (("sums", 0.25), ("words", 1.0))
        for figure, value in (
            ("groups", 2.0),
            ("reward_mean", 0.5),
            ("zero_spread_groups", equal),
            ("response_tokens_mean", 6.0),
        )
    }
    (of_words,) = first_answers({**figures, **sources, "groups_filtered": 0.0, "zero_spread_groups": 0.6}, config)
    assert of_words.seen.startswith("the 2 groups of source words before the first update")
