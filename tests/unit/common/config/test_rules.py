"""The section `rules`: names of figures that there are, bounds that are numbers, and rules that hold in runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.loading import parse_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.telemetry.advice import RULES, findings
from gspo.common.telemetry.figure_names import is_figure, present_name
from gspo.common.telemetry.findings import HELD_OUT_ERROR
from gspo.common.telemetry.step_time import BESIDE, CAUSES
from gspo.view.picture.plots import PLOTS
from tests.support.repository.source_files import ROOT

SHORT = {"name": "short", "figure": "response_tokens_mean", "below": 5, "steps": 2, "text": "Answers are short."}


def configured(**rules: Any) -> Config:
    values = {
        "name": "small",
        "model": {"path": "."},
        "data": {"prompts": "p.jsonl"},
        "reward": {"functions": [{"path": "r.py"}]},
        "run": {"total_steps": 3},
        "rules": rules,
    }
    return parse_config(values, Path())


def test_a_rule_with_the_former_name_of_a_figure_is_of_the_present_one() -> None:
    (rule,) = configured(own=[SHORT | {"figure": "tokens_per_s_per_card"}]).rules.own
    assert rule.figure == "tokens_per_s_per_gpu"


def test_a_rule_may_name_every_figure_that_is_judged_drawn_or_timed() -> None:
    recorded = json.loads((ROOT / "tests/planted/figures.json").read_text()).values()
    names = {name for run in recorded for step in run["steps"] for name in step} - {"step"}
    names = {present_name(name) for name in names}
    names |= {name for rule in RULES for name in rule.figures} - {HELD_OUT_ERROR}
    names |= {name for cause in CAUSES.values() for name in cause.figures} | BESIDE.keys()
    figures = [figure for plot in PLOTS for panel in plot.panels for figure in panel.figures]
    names |= {name for figure in figures for name in (figure.name, figure.width) if name}
    assert not [name for name in names if not is_figure(name)]
    assert is_figure("source_sums/reward_mean") and is_figure("part_judge_mean") and not is_figure("rewards_mean")


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"own": [SHORT | {"figure": "reward_maen"}]}, r"rules\.own\.0\.figure.*reward_maen.*'reward_mean'"),
        ({"own": [SHORT | {"below": "few"}]}, r"rules\.own\.0\.below.*few.*number"),
        ({"own": [SHORT | {"above": 3}]}, r"rules\.own\.0.*needs one bound"),
        ({"own": [SHORT, SHORT]}, r"rules\.own\.1\.name.*names two rules"),
        ({"bounds": {"cut_of": 0.3}}, r"rules\.bounds\.cut_of.*'cut_off'"),
        ({"bounds": {"cut_off": "much"}}, r"rules\.bounds\.cut_off.*much.*number"),
        ({"bounds": {"cut_off": 30}}, r"rules\.bounds\.cut_off"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_key(rules: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        configured(**rules)


def test_a_rule_of_the_users_own_has_a_finding_while_it_holds() -> None:
    config = configured(own=[SHORT | {"tries": ["a longer prompt"]}])
    steps = [{"step": float(step), "response_tokens_mean": mean} for step, mean in enumerate((9.0, 4.0, 3.0), 1)]
    assert findings(steps[:2], config) == {}
    (finding,) = findings(steps, config).values()
    assert finding.text.startswith(
        "own_short, since step 3: Answers are short (response_tokens_mean is 3). Try a longer prompt."
    )
    held_out = configured(own=[SHORT | {"figure": "held_out_mean", "below": 0.5, "steps": 1}])
    assert "own_short" in findings([{"step": 0.0, "held_out_mean": 0.4}, {"step": 1.0}], held_out)


LOWER_BOUNDS = {
    "weak_signal": 0.2,
    "cut_off": 0.2,
    "rollouts_fail": 0.2,
    "answers_alike": 0.2,
    "clipped_too_much": 0.2,
    "clip_is_noise": 0.01,
}
# Below the bounds of the rules themselves.
FIGURES = {
    "zero_spread_groups": 0.3,
    "truncated_share": 0.3,
    "skipped_failed": 3.0,
    "sequences": 7.0,
    "same_text_share": 0.3,
    "clipped_sequences": 0.3,
    "noise_share": 0.03,
}


def test_other_bounds_of_rules_count() -> None:
    steps = [{"step": float(step), **FIGURES} for step in range(1, 11)]
    assert not findings(steps, configured()).keys() & LOWER_BOUNDS.keys()
    seen = findings(steps, configured(bounds=LOWER_BOUNDS))
    assert seen.keys() >= LOWER_BOUNDS.keys()
    assert "over 20% for 10 steps" in seen["clipped_too_much"].text
