"""The metrics of a step, by hand: of its rows, and of the sums of its micro-batches."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.telemetry.source_figures import figures_of, named_sources
from gspo.learner.assembly.row_metrics import row_metrics
from gspo.learner.assembly.rows import Row
from gspo.learner.objective.figures import compared_stats, mismatch_metrics, objective_metrics
from gspo_core.loss import policy_loss
from gspo_core.stats import figures as figures_of_stats
from gspo_core.stats import mean_stats
from tests.support.tiny_model import make_tiny_model
from tests.support.training.rollout_rows import make_rows


def test_parts_of_the_reward_have_their_means(tmp_path: Path) -> None:
    def parts(right: float | None, form: float) -> str:
        return json.dumps([{"name": "right", "value": right}, {"name": "form", "value": form}])

    first, second, third, *_ = make_rows(make_tiny_model(tmp_path / "model"), num_groups=1)
    rows = [
        replace(first, parts_json=parts(1.0, 0.5)),
        replace(second, parts_json=parts(None, 0.25)),
        replace(third, parts_json=parts(0.0, 100.0), reward=None, failure="raised"),
    ]
    figures = row_metrics(rows, 1)
    assert figures["part_right_mean"] == 1.0
    assert figures["part_form_mean"] == pytest.approx(0.375)
    alone = json.dumps([{"name": "right", "value": 1.0}])
    assert not [name for name in row_metrics([replace(first, parts_json=alone)], 1) if name.startswith("part_")]


def test_the_most_frequent_phrase_has_its_share(tmp_path: Path) -> None:
    rows = make_rows(make_tiny_model(tmp_path / "model"), num_groups=4)
    one_each = list({row.group: row for row in rows}.values())
    phrase = list(range(90, 98))
    answers = ([1, 2, *phrase], [*phrase, 3, *phrase], [4, 5, *phrase, 6], [*phrase[1:], 7, 8])
    answered = [with_answer(row, ids) for row, ids in zip(one_each, answers, strict=True)]
    assert row_metrics(answered, 1)["same_phrase_share"] == 0.75
    short = [with_answer(row, phrase[:7]) for row in one_each]
    assert "same_phrase_share" not in row_metrics(short, 1), "no answer has a phrase"
    unlike = [with_answer(row, [at * 20 + n for n in range(9)]) for at, row in enumerate(one_each)]
    assert row_metrics(unlike, 1)["same_phrase_share"] == 0.25


def with_answer(row: Row, token_ids: list[int]) -> Row:
    """The row with other sampled tokens."""
    size = len(token_ids)
    return replace(
        row,
        token_ids=np.array(token_ids, dtype=np.int32),
        mask=np.ones(size, dtype=np.bool_),
        version=np.zeros(size, dtype=np.int32),
        logp=np.full(size, -1.0, dtype=np.float32),
    )


def test_each_source_has_its_own_figures(tmp_path: Path) -> None:
    rows = make_rows(make_tiny_model(tmp_path / "model"), num_groups=3)
    groups = sorted({row.group for row in rows})
    named = [
        replace(row, source="a" if row.group == groups[0] else "b", reward=float(row.group == groups[1]))
        for row in rows
    ]
    own = [row for row in named if row.source == "a"]
    figures = row_metrics(named, 1)
    assert {name: figures[f"source_a/{name}"] for name in ("groups", "reward_mean", "zero_spread_groups")} == {
        "groups": 1.0,
        "reward_mean": 0.0,
        "zero_spread_groups": 1.0,
    }
    assert (figures["source_b/groups"], figures["source_b/reward_mean"]) == (2.0, 0.5)
    assert figures["source_a/response_tokens_mean"] == sum(int(row.mask.sum()) for row in own) / len(own)
    assert sorted(named_sources([figures])) == ["a", "b"]
    failed = row_metrics([replace(row, reward=None, failure="raised") for row in own], 1)
    assert figures_of("a", failed).keys() == {"groups", "response_tokens_mean"}
    assert not named_sources([row_metrics(rows, 1)])


def test_the_age_is_of_the_tokens_that_are_trained(tmp_path: Path) -> None:
    first, second, third, *_ = make_rows(make_tiny_model(tmp_path / "model"), num_groups=1)
    rows = [
        replace(first, version=np.where(first.mask, 3, -1)),
        replace(second, version=np.where(second.mask, 1, -1)),
        replace(third, skipped="stale"),
    ]
    old, new = int(second.mask.sum()), int(first.mask.sum())
    figures = row_metrics(rows, 6)
    assert (figures["tokens"], figures["sequences"], figures["groups"]) == (old + new, 2.0, 1.0)
    assert figures["age_mean"] == pytest.approx((4 * old + 2 * new) / (old + new))
    assert figures["age_max"] == 4.0
    assert row_metrics(rows[2:], 6)["age_mean"] == 0.0


def test_conversations_have_figures_and_single_answers_none(tmp_path: Path) -> None:
    first, second, third, *_ = make_rows(make_tiny_model(tmp_path / "model"), num_groups=1)
    talked = replace(first, turns_json="[1]", num_turns=2, num_tool_calls=3, outcome="environment_done")
    cut = replace(second, turns_json="[1]", num_turns=5, num_malformed_calls=2, num_cut_turns=1, outcome="turn_limit")
    figures = row_metrics([talked, cut], 1)
    assert (figures["turns_mean"], figures["tool_calls_mean"]) == (3.5, 1.5)
    assert figures["turn_tokens_mean"] == (talked.mask.sum() + cut.mask.sum()) / 7
    assert figures["turns_done_mean"] == 2.0
    assert "turns_done_mean" not in row_metrics([cut], 1)
    assert (figures["malformed_calls_mean"], figures["cut_turns_mean"]) == (1.0, 0.5)
    assert (figures["ended_environment_done"], figures["ended_turn_limit"]) == (0.5, 0.5)
    assert not [name for name in row_metrics([third], 1) if name.startswith(("turn", "ended", "tool"))]


def outside(sigma: float, low: float, high: float) -> float:
    """P(log s < log(1 - low)) + P(log s > log(1 + high)), log s ~ N(0, sigma^2)."""
    root2_sigma = sigma * math.sqrt(2)
    return (math.erfc(-math.log(1 - low) / root2_sigma) + math.erfc(math.log(1 + high) / root2_sigma)) / 2


@pytest.mark.parametrize("preset", ["gspo", "grpo"])
def test_the_noise_share_is_of_what_the_clip_looks_at(preset: str) -> None:
    """Three answers of two tokens, off by +-0.01 within each and by -0.001, 0, 0.001 in the mean.

    The clip of GSPO leaves out the means of the first and the last, that of GRPO the tokens at -0.011.
    """
    off = torch.tensor([[0.009, -0.011], [0.01, -0.01], [0.011, -0.009]], dtype=torch.float64)
    clip = {"pg_clip_low": 0.01, "pg_clip_high": 0.02} if preset == "grpo" else {}
    algorithm = AlgorithmConfig.model_validate({"preset": preset, **clip})
    every = torch.ones_like(off).bool()
    stats = compared_stats(algorithm, off, torch.zeros_like(off), every, every, None)
    figures = mismatch_metrics(algorithm, stats, figures_of_stats(stats), torch.tensor([2, 2, 8]))
    # sqrt((2 * 0.0001 * 3 + 2 * 0.000002) / 5) and sqrt(0.000002 / 2).
    sigma, sigma_sequence = math.sqrt(0.000604 / 5), 0.001
    assert figures["sigma_token"] == pytest.approx(sigma)
    assert figures["sigma_sequence"] == pytest.approx(sigma_sequence, rel=1e-4)
    assert figures["mismatch_tokens"] == 6
    if preset == "grpo":
        expected = [1 / 6, outside(sigma, 0.01, 0.02)]
    else:
        expected = [2 / 3, sum(outside(sigma / math.sqrt(length), 3e-4, 4e-4) for length in (2, 2, 8)) / 3]
    assert [figures["noise_share"], figures["noise_share_independent"]] == pytest.approx(expected, rel=1e-3)


def test_what_the_clip_cut_is_the_sum_of_both_sides() -> None:
    """One of four answers of two tokens is below the clip with A < 0, two above it with A > 0, one inside."""
    log_ratio = torch.tensor([[-0.3] * 2, [0.3] * 2, [0.3] * 2, [0.0] * 2], dtype=torch.float64)
    advantage = torch.tensor([[-1.0] * 2, [1.0] * 2, [1.0] * 2, [2.0] * 2], dtype=torch.float64)
    ones = torch.ones_like(log_ratio)
    policy = policy_loss(log_ratio, 0 * ones, advantage, ones, pg_clip_low=0.1, pg_clip_high=0.1)
    figures = objective_metrics(figures_of_stats({**policy.stats, **mean_stats("entropy", ones, ones)}))
    for unit in ("sequences", "tokens"):
        shares = [figures[f"clipped_{unit}{side}"] for side in ("", "_low", "_high")]
        assert shares == [0.75, 0.25, 0.5], unit
    assert (figures["outside_clip_sequences"], figures["entropy"]) == (0.75, 1.0)
    assert (figures["log_ratio_max"], figures["advantage_mean"]) == pytest.approx((0.3, 0.75))
