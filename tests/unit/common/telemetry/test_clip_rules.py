"""The rules on the objective: each one holds exactly under its condition, and names keys that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gspo.common.config.reference import explain
from gspo.common.config.schema import Config
from gspo.common.telemetry.clip_rules import CLIP_RULES
from gspo.common.telemetry.findings import Steps, apply_rules


def configured(minimal: dict[str, Any], **sections: dict[str, Any]) -> Config:
    return Config.model_validate(minimal | sections)


def advice(figures: Steps, config: Config) -> dict[str, str]:
    return {name: finding.text for name, finding in apply_rules(CLIP_RULES, figures, config).items()}


def steps(num: int, **figures: float) -> list[dict[str, float]]:
    return [figures] * num


def test_good_figures_call_for_nothing(config: Config) -> None:
    assert advice(steps(30, clipped_sequences=0.2, noise_share=0.01), config) == {}


def test_ten_steps_over_forty_percent_are_too_much(config: Config) -> None:
    assert list(advice(steps(10, clipped_sequences=0.41), config)) == ["clipped_too_much"]
    assert advice(steps(9, clipped_sequences=0.41), config) == {}
    assert advice([*steps(9, clipped_sequences=0.9), {"clipped_sequences": 0.4}], config) == {}


def test_the_remedies_for_clipping_fit_the_run(minimal: dict[str, Any]) -> None:
    high = steps(10, clipped_sequences=0.5)
    text = advice(high, configured(minimal))["clipped_too_much"]
    assert "50% of sequences" in text
    assert "old_logprobs: recompute" in text
    assert "max_lag below 1" in text
    other = configured(minimal, algorithm={"old_logprobs": "recompute"}, staleness={"max_lag": 0})
    text = advice(high, other)["clipped_too_much"]
    assert "recompute" not in text
    assert "max_lag" not in text
    assert "wider clip" in text


def test_a_clip_that_never_fired_in_twenty_steps_is_said(config: Config) -> None:
    assert "0.0003/0.0004" in advice(steps(20, clipped_sequences=0.0), config)["clip_is_silent"]
    assert advice(steps(19, clipped_sequences=0.0), config) == {}
    assert advice([*steps(19, clipped_sequences=0.0), {"clipped_sequences": 1e-4}], config) == {}


def test_a_clip_is_silent_where_a_schedule_has_ended_the_updates(config: Config) -> None:
    peak = config.learner.learning_rate
    figures = steps(20, clipped_sequences=0.0, learning_rate=0.6 * peak)
    assert list(advice(figures, config)) == ["clip_is_silent"]
    assert advice([*figures[:-1], {**figures[-1], "learning_rate": 0.4 * peak}], config) == {}


def test_steps_before_the_last_ones_do_not_count(config: Config) -> None:
    figures = [*steps(5, clipped_sequences=0.3), *steps(20, clipped_sequences=0.0)]
    assert list(advice(figures, config)) == ["clip_is_silent"]


def test_a_clip_is_no_matter_where_a_teacher_trains_by_its_loss_alone(minimal: dict[str, Any]) -> None:
    teacher = {"path": "larger", "alone": True}
    figures = steps(20, clipped_sequences=0.0, noise_share=0.9)
    assert advice(figures, configured(minimal, teacher={**teacher, "kl_in": "loss"})) == {}
    assert list(advice(figures, configured(minimal, teacher=teacher))) == ["clip_is_silent", "clip_is_noise"]


def test_noise_that_clips_a_third_is_said_unless_log_probs_are_recomputed(minimal: dict[str, Any]) -> None:
    noisy = steps(1, noise_share=0.64)
    assert "64% of sequences" in advice(noisy, configured(minimal))["clip_is_noise"]
    assert advice(noisy, configured(minimal, algorithm={"old_logprobs": "recompute"})) == {}
    assert advice(steps(1, noise_share=0.05), configured(minimal)) == {}


def test_noise_that_is_noticed_names_the_clip_that_is_wide_enough(minimal: dict[str, Any]) -> None:
    text = advice(steps(1, noise_share=0.12, noise_clip=0.0011), configured(minimal))["clip_is_noise"]
    assert "12% of sequences" in text and "at 0.0011 on both sides, noise puts at most 1 % outside" in text
    assert "clipping is noise" not in text
    assert "clipping is noise" in advice(steps(1, noise_share=0.34), configured(minimal))["clip_is_noise"]


def test_the_remedy_of_the_largest_cause_comes_first(minimal: dict[str, Any]) -> None:
    outside = {"clipped_sequences": 0.5, "outside_clip_sequences": 0.6}
    cases = {
        "algorithm.old_logprobs: recompute": (0.5, 0.4),
        "staleness.max_lag below 1": (0.5, 0.1),
        "a wider clip": (0.2, 0.1),
    }
    for remedy, (start, noise) in cases.items():
        causes = {"outside_clip_at_start": start, "outside_clip_noise": noise, "outside_clip_at_end": 0.6}
        figures = steps(10, **outside, **causes)
        text = advice(figures, configured(minimal))["clipped_too_much"]
        assert f"Try {remedy}" in text, remedy
        assert f"{noise:.1%} ± 0.0% by the engines' noise" in text


def test_a_bound_of_weights_calls_for_no_advice_on_lost_signal(minimal: dict[str, Any]) -> None:
    cispo = configured(minimal, algorithm={"objective": "cispo"})
    assert advice(steps(20, clipped_sequences=0.9), cispo) == {}
    assert advice(steps(20, clipped_sequences=0.0), cispo) == {}
    dppo = configured(minimal, algorithm={"preset": "grpo", "objective": "dppo_tv"})
    text = advice(steps(20, clipped_tokens=0.9), dppo)["clipped_too_much"]
    assert "recompute" not in text


def test_a_product_that_weighs_answers_down_is_said(minimal: dict[str, Any]) -> None:
    keys = {"old_logprobs": "recompute", "behavior_correction": "truncate", "behavior_level": "product"}
    product, low = configured(minimal, algorithm=keys), steps(5, behavior_weight_mean=1.2, behavior_weight_geomean=0.06)
    assert "weights is 0.06 before" in advice(low, product)["answers_weighed_down"]
    assert advice(low[:4], product) == {}
    assert advice([*low[:4], {"behavior_weight_geomean": 0.5}], product) == {}
    assert advice(low, configured(minimal, algorithm=keys | {"behavior_level": "geometric"})) == {}


def test_conversations_of_shorter_and_more_turns_are_said(config: Config) -> None:
    shrinking = [{"turn_tokens_mean": 30.0 - step, "turns_mean": 4 + step / 10} for step in range(20)]
    assert "fell to 46% and turns rose to 136%" in advice(shrinking, config)["turns_shrink"]
    assert "seq-mean-token-sum-turn-norm" in advice(shrinking, config)["turns_shrink"]
    assert advice(shrinking[1:], config) == {}
    fewer = [{**figures, "turns_mean": 4.0} for figures in shrinking]
    longer = [{**figures, "turn_tokens_mean": 30.0} for figures in shrinking]
    assert advice(fewer, config) == advice(longer, config) == {}


def test_a_dtype_that_the_run_has_is_no_remedy_for_noise(minimal: dict[str, Any]) -> None:
    noisy = steps(1, noise_share=0.64)
    for dtype, is_named in (("float32", False), ("bfloat16", True)):
        text = advice(noisy, configured(minimal, generation={"dtype": dtype}))["clip_is_noise"]
        assert ("generation.dtype: float32, which a resume takes" in text) is is_named
        assert "algorithm.old_logprobs: recompute, or a wider clip" in text


def test_under_token_ratios_the_share_is_that_of_tokens(minimal: dict[str, Any]) -> None:
    config = configured(minimal, algorithm={"preset": "grpo"})
    # Nearly every long answer has a clipped token somewhere; no signal is lost by that.
    assert advice(steps(20, clipped_sequences=0.99, clipped_tokens=0.01), config) == {}
    found = advice(steps(20, clipped_sequences=0.99, clipped_tokens=0.5, noise_share=0.5), config)
    assert list(found) == ["clipped_too_much", "clip_is_noise"]
    assert all("50% of tokens" in text for text in found.values())
    assert "none of the tokens" in advice(steps(20, clipped_tokens=0.0), config)["clip_is_silent"]


def test_a_batch_that_could_not_be_filled_is_said(minimal: dict[str, Any]) -> None:
    config = configured(minimal, algorithm={"rollout_batch_size": 4, "max_refill": 2, "filter_zero_spread": True})
    text = advice(steps(1, groups=3, groups_filtered=7, groups_failed=1), config)["batch_is_small"]
    assert "3 of 4 groups were trained, since 8 were filtered" in text
    assert advice(steps(1, groups=4, groups_filtered=9), config) == {}
    # The last batch before the prompts end may be small, also with few groups filtered.
    assert advice(steps(1, groups=3, groups_filtered=7), config) == {}


@pytest.mark.parametrize(
    "figures",
    [
        steps(10, clipped_sequences=0.9),
        steps(20, clipped_sequences=0.0),
        steps(1, noise_share=0.9),
        steps(1, groups=0, groups_failed=640),
    ],
)
def test_advice_names_keys_that_exist(config: Config, figures: list[dict[str, float]]) -> None:
    (text,) = advice(figures, config).values()
    known = {key.name for key in explain()}
    named = re.findall(r"\b(?:algorithm|staleness|generation)\.[a-z_]+", text)
    assert named
    assert set(named) <= known
