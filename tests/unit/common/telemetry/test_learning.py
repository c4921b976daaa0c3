"""The verdict on learning: planted figures are named by their rule, healthy ones by none."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from gspo.common.config.reference import explain
from gspo.common.config.schema import Config
from gspo.common.telemetry.advice import verdict
from gspo.common.telemetry.learning import TREND_STEPS, learning_findings

Figures = dict[str, float]
HEALTHY: Figures = {
    "reward_mean": 0.4,
    "reward_std": 0.49,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "groups": 16.0,
    "zero_spread_groups": 0.3,
    "truncated_share": 0.05,
    "entropy": 0.6,
    "reference_kl": 0.01,
    "grad_norm": 0.8,
}


def configured(minimal: dict[str, Any], **sections: dict[str, Any]) -> Config:
    return Config.model_validate(minimal | sections)


def trend(name: str, first: float, last: float) -> list[Figures]:
    """A figure that moves evenly over the steps of a trend, beside healthy ones."""
    moves = [first + (last - first) * place / (TREND_STEPS - 1) for place in range(TREND_STEPS)]
    return [HEALTHY | {name: value} for value in moves]


def healthy(seed: int) -> list[Figures]:
    """A run that learns: noisy rewards that rise, an entropy that falls by half."""
    draw, steps = random.Random(seed), []  # noqa: S311
    for step in range(TREND_STEPS):
        rise = step / TREND_STEPS
        moved = {"reward_mean": 0.2 + 0.5 * rise + draw.gauss(0, 0.12), "entropy": 0.8 - 0.4 * rise}
        moved |= {"grad_norm": draw.uniform(0.2, 4.0), "zero_spread_groups": draw.uniform(0.1, 0.7)}
        steps.append(HEALTHY | moved)
    return steps


@pytest.mark.parametrize(
    ("figures", "rule", "words"),
    [
        ([HEALTHY | {"zero_spread_groups": 1.0, "reward_max": 0.0}] * 3, "no_signal", "every answer gets 0"),
        ([HEALTHY | {"zero_spread_groups": 1.0, "reward_min": 1.0}] * 3, "no_signal", "every answer gets 1"),
        ([HEALTHY | {"zero_spread_groups": 1.0}] * 3, "no_signal", "too easy or too hard"),
        (
            [HEALTHY | {"zero_spread_groups": 1.0, "truncated_share": 0.9}] * 3,
            "no_signal",
            "90% of .* cut off",
        ),
        ([HEALTHY | {"zero_spread_groups": 0.9}] * 5, "weak_signal", "90% of the groups"),
        ([HEALTHY | {"truncated_share": 0.6}] * 3, "cut_off", "60% of the answers"),
        (trend("reward_mean", 0.6, 0.1), "reward_falls", "fell from 0.561 to 0.139"),
        (trend("entropy", 1.0, 0.0), "entropy_collapses", "entropy fell"),
        (trend("reference_kl", 0.1, 2.0), "kl_runs_away", "rose from"),
        ([*[HEALTHY] * 9, HEALTHY | {"grad_norm": 90.0}], "gradient_explodes", "90, and 0.8 was usual"),
    ],
)
def test_a_planted_fault_is_named(config: Config, figures: list[Figures], rule: str, words: str) -> None:
    findings = learning_findings(figures, config)
    assert re.search(words, findings[rule])
    assert findings.keys() <= {rule, "cut_off"}, "no other fault was planted"


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_learns_has_no_finding(config: Config, seed: int) -> None:
    figures = healthy(seed)
    assert not [name for end in range(1, len(figures) + 1) for name in learning_findings(figures[:end], config)]


def test_a_rule_is_silent_without_its_figures_or_steps(config: Config) -> None:
    assert learning_findings([HEALTHY | {"zero_spread_groups": 1.0}] * 2, config) == {}
    assert learning_findings([{"reward_mean": 0.0}] * TREND_STEPS, config) == {}


def test_equal_rewards_are_no_matter_where_a_batch_or_a_teacher_gives_the_signal(minimal: dict[str, Any]) -> None:
    figures = [HEALTHY | {"zero_spread_groups": 1.0}] * 3
    batch = configured(minimal, algorithm={"adv_estimator": "reinforce", "reward_norm": "batch"})
    assert learning_findings(figures, batch) == {}
    assert learning_findings(figures, configured(minimal, teacher={"path": "larger"})) == {}


def test_speed_is_no_matter_without_a_signal(config: Config) -> None:
    times = {"training_s": 3.0, "step_s": 4.0, "wait_s": 1.0, "wait_generation_s": 1.0}
    dead = [HEALTHY | times | {"zero_spread_groups": 1.0}] * 3
    alive = verdict([HEALTHY | times] * 3, config, 1)
    bound = verdict(dead, config, 1)
    assert alive is not None and bound is not None
    assert alive.change and not bound.change


def test_keys_that_are_named_exist(config: Config) -> None:
    known = {key.name for key in explain()}
    planted = [*[HEALTHY] * 17, *[HEALTHY | {"zero_spread_groups": 0.9, "truncated_share": 0.9, "grad_norm": 99.0}] * 5]
    texts = " ".join(learning_findings(planted, config).values())
    named = set(re.findall(r"\b(?:algorithm|learner|data)\.[a-z_]+", texts))
    assert named and named <= known
