"""The verdict on learning: planted figures are named by their rule, healthy ones by none."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest

from gspo.common.config.reference import explain
from gspo.common.config.schema import Config
from gspo.common.telemetry.advice import verdict
from gspo.common.telemetry.findings import HELD_OUT, HELD_OUT_ERROR, RecentSteps, Steps, apply_rules
from gspo.common.telemetry.learning_rules import FLAT_STEPS, LEARNING_RULES, PARTING_STEPS, TREND_STEPS, has_signal

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
    "mini_batches_not_applied": 0.0,
    "skipped_failed": 1.0,
    "sequences": 127.0,
    "groups_filtered": 0.0,
    "response_tokens_mean": 40.0,
    "reward_length_correlation": 0.1,
    "eos_share": 0.9,
    "same_text_share": 0.05,
}


def learning_findings(figures: Steps, config: Config) -> dict[str, str]:
    return {name: finding.text for name, finding in apply_rules(LEARNING_RULES, figures, config).items()}


def configured(minimal: dict[str, Any], **sections: dict[str, Any]) -> Config:
    return Config.model_validate(minimal | sections)


def trend(name: str, first: float, last: float) -> list[Figures]:
    """A figure that moves evenly over the steps of a trend, beside healthy ones."""
    moves = [first + (last - first) * place / (TREND_STEPS - 1) for place in range(TREND_STEPS)]
    return [HEALTHY | {name: value} for value in moves]


_HEALTHY_STEPS = 40
_SOURCES, _PARTS = (("sums", 0.2), ("words", 0.4)), (("right", 0.4), ("form", 0.0))


def healthy(seed: int) -> list[Figures]:
    """A run that learns: noisy rewards that rise, an entropy that falls by half."""
    draw, steps = random.Random(seed), []  # noqa: S311
    for step in range(_HEALTHY_STEPS):
        rise = step / _HEALTHY_STEPS
        moved = {"reward_mean": 0.2 + 0.5 * rise + draw.gauss(0, 0.12), "entropy": 0.8 - 0.4 * rise}
        moved |= {"grad_norm": draw.uniform(0.2, 4.0), "zero_spread_groups": draw.uniform(0.1, 0.7)}
        moved |= {f"source_{name}/reward_mean": rate + 0.4 * rise + draw.gauss(0, 0.1) for name, rate in _SOURCES}
        moved |= {f"part_{name}_mean": 0.3 + gain * rise + draw.gauss(0, 0.1) for name, gain in _PARTS}
        if step % 5 == 0:
            moved |= {"sigma_token": draw.uniform(0.002, 0.004)}
            moved |= {HELD_OUT: 0.2 + 0.4 * rise + draw.gauss(0, 0.03), HELD_OUT_ERROR: 0.03}
        steps.append(HEALTHY | moved)
    return steps


def parting(figure: str) -> list[Figures]:
    """Two figures of which one rises and one falls, with some noise."""
    draw = random.Random(0)  # noqa: S311
    moves = [(0.2 + n / 40, 0.7 - n / 40) for n in range(PARTING_STEPS)]
    noise = [draw.gauss(0, 0.02) for _ in moves]
    return [
        HEALTHY | {figure.format("up"): up + noise[n], figure.format("down"): down + noise[-n]}
        for n, (up, down) in enumerate(moves)
    ]


def held_out(*means: float) -> list[Figures]:
    """Evaluations with three steps between them."""
    measured = [HEALTHY | {HELD_OUT: mean, HELD_OUT_ERROR: math.sqrt(mean * (1 - mean) / 300)} for mean in means]
    return [step for evaluated in measured for step in (evaluated, HEALTHY, HEALTHY, HEALTHY)]


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
        (
            [HEALTHY | {"grad_norm": 0.0, "clipped_sequences": 1.0}] * 3,
            "no_gradient",
            "0 in 3 steps although groups differ.*Likely: nearly all of the signal is clipped",
        ),
        ([HEALTHY | {"zero_spread_groups": 0.9}] * 5, "weak_signal", "90% of the groups have equal"),
        ([HEALTHY | {"truncated_share": 0.6}] * 3, "cut_off", "60% of the answers"),
        (trend("reward_mean", 0.6, 0.1), "reward_falls", "fell from 0.572 to 0.128"),
        (trend("entropy", 1.0, 0.0), "entropy_collapses", "entropy fell"),
        (trend("entropy", 0.5, 6.0), "entropy_grows", "rose from 0.81 to 5.7 nats"),
        (trend("reference_kl", 0.1, 2.0), "kl_runs_away", "rose from"),
        (
            [*[HEALTHY] * 7, *(HEALTHY | {"grad_norm": norm} for norm in (90.0, 0.8, 99.0))],
            "gradient_explodes",
            "90 or more in two of the last three steps, and 0.8 is usual in the last 10",
        ),
        ([HEALTHY | {"truncated_share": 1.0, "eos_share": 0.0}] * 3, "cut_off", "no answer has an end token"),
        ([HEALTHY | {"skipped_failed": 90.0, "sequences": 38.0}] * 3, "rollouts_fail", "70% of the rollouts"),
        ([HEALTHY | {"groups_failed": 1e6}] * 3, "rollouts_fail", "100% of the rollouts .*or failed with their group"),
        ([HEALTHY | {"mini_batches_not_applied": 2.0}] * 3, "updates_not_applied", "6 updates of the last 3 steps"),
        ([HEALTHY | {"same_text_share": 0.95}] * 5, "answers_alike", "95% of a step's answers"),
        ([HEALTHY | {"groups_filtered": 400.0}] * 5, "curriculum_starves", "takes 400 more"),
        (
            [HEALTHY | {"reward_length_correlation": 0.7, "response_tokens_mean": 20.0 + 4 * n} for n in range(5)],
            "length_pays",
            r"correlation 0.70\), and answers went from 20.0 to 36.0",
        ),
        ([HEALTHY | {"reward_length_correlation": 0.9}] * 5, "length_pays", "correlation 0.90"),
        (
            [HEALTHY | {"age_mean": 9.0, "outside_clip_at_start": 0.6, "noise_share": 0.1}] * 3,
            "policy_is_stale",
            "9.0 versions old, and before its first update 60%",
        ),
        ([HEALTHY] * FLAT_STEPS, "reward_flat", "stood still within 50 steps: 0.4, then 0.4"),
        (
            [HEALTHY | {"sigma_token": (0.02 if n >= 10 else 0.002) * 2 ** (n % 2)} for n in range(15)],
            "mismatch_grows",
            "from 0.0028 to 0.026",
        ),
        (parting("source_{}/reward_mean"), "sources_part", "source up rises while that of down falls"),
        (parting("part_{}_mean"), "rewards_part", "up rises while down falls"),
        (held_out(0.043, 0.010), "held_out_falls", "0.043 to 0.01 .*the training reward did not rise"),
        (held_out(0.3, 0.6, 0.59, 0.2), "held_out_falls", "0.6 to 0.2"),
    ],
)
def test_a_planted_fault_is_named(config: Config, figures: list[Figures], rule: str, words: str) -> None:
    findings = learning_findings(figures, config)
    assert re.search(words, findings[rule])
    assert findings.keys() <= {rule, "cut_off"}, "no other fault was planted"


def test_what_moved_with_a_held_out_reward_that_fell_is_named(config: Config) -> None:
    first = {"reward_mean": 0.3, "same_phrase_share": 0.1, "part_right_mean": 0.3, "part_form_mean": 0.2}
    last = {"reward_mean": 0.7, "same_phrase_share": 0.9, "part_right_mean": 0.1, "part_form_mean": 0.8}
    steps = [{**step, **figures} for step, figures in zip(held_out(0.4, 0.2), [first] * 4 + [last] * 4, strict=True)]
    steps[4]["response_tokens_mean"] = 60.0
    text = learning_findings(steps, config)["held_out_falls"]
    assert (
        "while the training reward rose. Likely: the part form of the training reward rose by 0.6 while right fell; "
        "or answers went from 40.0 to 60.0 tokens; or 90% of the answers share one phrase, 10% did before; or " in text
    )
    assert "phrase" not in learning_findings(held_out(0.4, 0.2), config)["held_out_falls"]


def test_sources_part_by_more_than_a_curriculum_moves_them(config: Config) -> None:
    narrow = [
        step | {"source_up/reward_mean": 0.88 + (step["source_up/reward_mean"] - 0.2) / 10}
        for step in parting("source_{}/reward_mean")
    ]
    assert "sources_part" not in learning_findings(narrow, config)


def test_cut_answers_that_are_masked_explain_a_gradient_of_zero(minimal: dict[str, Any]) -> None:
    config = configured(minimal, algorithm={**minimal.get("algorithm", {}), "mask_truncated_completions": True})
    steps = [HEALTHY | {"grad_norm": 0.0, "truncated_share": 0.9}] * 3
    text = learning_findings(steps, config)["no_gradient"]
    assert "Likely: 90% of the answers are cut off, and those are not trained on; or" in text
    assert not has_signal(steps, config)


def test_a_reward_may_stand_still_where_a_schedule_has_ended_the_updates(config: Config) -> None:
    low = HEALTHY | {"learning_rate": 0.4 * config.learner.learning_rate}
    assert learning_findings([*[HEALTHY] * (FLAT_STEPS - 1), low], config) == {}


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_learns_has_no_finding(config: Config, seed: int) -> None:
    figures = healthy(seed)
    assert not [name for end in range(1, len(figures) + 1) for name in learning_findings(figures[:end], config)]


def test_a_finding_says_since_when_it_holds_and_where_its_rollouts_are(config: Config) -> None:
    recent = RecentSteps(kept=50)
    for number in range(1, 12):
        recent.add(number, HEALTHY | {"truncated_share": 0.9 if number > 4 else 0.1})
    finding = apply_rules(LEARNING_RULES, recent.judged(), config)["cut_off"]
    assert (finding.since, finding.rollouts) == (7, "/rollouts?step=11&outcome=truncated")
    assert finding.text.startswith("cut_off, since step 7: 90% of the answers")
    assert finding.causes and finding.tries and "Likely: the limit" in finding.text


def test_evaluations_belong_to_the_step_that_made_their_version(config: Config) -> None:
    recent = RecentSteps("held")
    recent.add_evaluation("held", 0, {"sampled_mean": 0.6, "sampled_stderr": 0.02, "greedy_mean": 0.7})
    recent.add_evaluation("other", 2, {"sampled_mean": 0.9, "sampled_stderr": 0.02})
    for number in (1, 2, 3):
        recent.add(number, HEALTHY)
    assert "held_out_falls" not in apply_rules(LEARNING_RULES, recent.judged(), config)
    recent.add_evaluation("held", 3, {"greedy_mean": 0.3, "greedy_stderr": 0.02})
    found_now = apply_rules(LEARNING_RULES, recent.judged(), config)["held_out_falls"]
    assert (found_now.since, len(recent.steps)) == (3, 3)
    assert "0.6 to 0.3" in found_now.seen


def test_a_reward_that_stands_still_near_its_best_is_no_matter(config: Config) -> None:
    assert learning_findings([HEALTHY | {"reward_mean": 0.95, "reward_std": 0.2}] * FLAT_STEPS, config) == {}


def test_one_odd_measurement_is_no_finding(config: Config) -> None:
    spike = [*[HEALTHY] * 9, HEALTHY | {"grad_norm": 90.0}]
    # The noise of one step after the other varies tenfold in a healthy run.
    noise = [HEALTHY | {"sigma_token": 0.002 if n % 3 else 0.05} for n in range(30)]
    assert learning_findings(spike, config) == learning_findings(noise, config) == {}


def test_equal_rewards_are_no_matter_once_most_answers_are_right(config: Config) -> None:
    learned = [HEALTHY | {"reward_mean": 0.95, "reward_std": 0.2, "zero_spread_groups": 0.85}] * 5
    assert learning_findings(learned, config) == {}
    stuck = [step | {"reward_mean": 0.85} for step in learned]
    assert list(learning_findings(stuck, config)) == ["weak_signal"]


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
