"""The closed formulas of step and staleness, against the measured simulated runs of docs/benchmarks.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tails.long_answers import GROUPS, LONGEST, MAX_ROLLOUTS, MEDIAN, SETTINGS, SIGMA, SIZE
from gspo.cli.plan.rollout_lengths import RolloutLengths
from gspo.cli.plan.staleness import SteadyState, steady_state
from gspo.common.config.schema import Config
from tests.support.training.rollout_rows import make_config

ROOT = Path(__file__).parents[4]
CASES = json.loads((ROOT / "docs/benchmarks.json").read_text())["tail"]["cases"]
SIMULATED = [case for case in CASES if not case["way"]["real"]]
LENGTHS = RolloutLengths(10, MEDIAN, SIGMA, LONGEST * MEDIAN, SIZE)
# At the end of a step that waits for its longest answers few rollouts are left, and each gets its tokens faster.
FEW, ALL = SETTINGS.decode_step_s(8), SETTINGS.decode_step_s(MAX_ROLLOUTS)


def config_of(staleness: dict[str, Any]) -> Config:
    sizes = {"rollout_batch_size": GROUPS, "num_return_sequences_in_group": SIZE, "response_length": LONGEST * MEDIAN}
    return make_config(Path("model"), algorithm=sizes, staleness=staleness)


def predict(staleness: dict[str, Any], token_s: float, *, window: bool = True, train: float = 1.0) -> SteadyState:
    tokens = GROUPS * SIZE * LENGTHS.mean()
    return steady_state(
        config_of(staleness),
        LENGTHS,
        token_s=token_s,
        generation_s=tokens * ALL / MAX_ROLLOUTS,
        learner_s=train * tokens * SETTINGS.train_s_per_token,
        update_s=SETTINGS.load_s,
        window=window,
    )


@pytest.mark.parametrize("case", SIMULATED, ids=lambda case: str(case["label"]))
def test_measured_steps_lie_in_the_predicted_range(case: dict[str, Any]) -> None:
    """Services, streams and log take some of a step as well: up to a tenth in these short ones."""
    staleness, step_s = case["way"]["staleness"], case["seconds"] / case["num_steps"]
    fast, slow = predict(staleness, FEW, window=False), predict(staleness, ALL)
    assert 0.95 * fast.step_s < step_s < 1.1 * slow.step_s
    assert slow.step_s < 2.1 * fast.step_s


@pytest.mark.parametrize("case", SIMULATED, ids=lambda case: str(case["label"]))
def test_measured_ages_are_the_predicted_ones(case: dict[str, Any]) -> None:
    state = predict(case["way"]["staleness"], ALL)
    assert state.staleness_mean == pytest.approx(case["age_mean"], rel=0.15)
    assert state.staleness_p95 <= case["age_max"] + 1
    assert state.stale_share == pytest.approx(case["masked_share"], abs=0.01)


@pytest.mark.parametrize(
    ("staleness", "train", "step_s", "mean", "p95", "stale_share"),
    [
        ({"max_lag": 4, "on_stale": "mask", "max_token_age": 16}, 1.0, 1.90, 3.90, 8.0, 0.0),
        ({"max_lag": 4, "on_stale": "mask", "max_token_age": 6}, 0.5 / 0.9, 1.84, 3.49, 7.0, 0.079),
    ],
)
def test_tails_are_predicted(
    staleness: dict[str, Any], train: float, step_s: float, mean: float, p95: float, stale_share: float
) -> None:
    """28 steps of `gspo run` with the engines of benchmarks/simulated at half their times, on 2026-11-23."""
    state = predict(staleness, ALL, train=train)
    assert state.step_s == pytest.approx(step_s, rel=0.12)
    assert (state.staleness_mean, state.staleness_p95) == pytest.approx((mean, p95), rel=0.12)
    assert state.stale_share == pytest.approx(stale_share, abs=0.01)


def test_dropped_groups_lengthen_a_step() -> None:
    """The same with `drop` and training of 1.2 times the generation: a step of 2.64 s, the oldest group of age 3."""
    state = predict({"max_lag": 3, "on_stale": "drop"}, ALL, train=1.2 / 0.9)
    assert state.step_s == pytest.approx(2.64, rel=0.1)
    assert 0.2 < state.stale_share < 0.5


def test_little_s_law_gives_the_mean() -> None:
    """A learner that is always busy: each slot is taken for max_lag + 1 steps, for any lengths."""
    for lag in (1, 3, 8):
        state = predict({"max_lag": lag, "on_stale": "mask"}, ALL, train=10)
        assert state.bound == "training"
        assert state.staleness_mean == pytest.approx(lag, rel=1e-6)


def test_fast_learners_train_fresh_rollouts() -> None:
    state = predict({"max_lag": 8, "on_stale": "mask"}, ALL, train=0.1)
    assert state.bound == "generation"
    assert 1 < state.staleness_mean < 4


def test_too_few_slots_bound_a_step() -> None:
    """Each of (max_lag + 1) batches of groups takes the generation of its longest rollout and a training."""
    state = predict({"max_lag": 1, "on_stale": "mask"}, 10 * ALL, train=0.1)
    assert state.bound == "open groups"
    trained_s = 0.1 * GROUPS * SIZE * LENGTHS.mean() * SETTINGS.train_s_per_token
    slot_s = LENGTHS.groups().max(1).mean() * 10 * ALL + trained_s + SETTINGS.load_s
    assert state.step_s == pytest.approx(slot_s / 2)


def test_stale_tokens_follow_the_limit() -> None:
    shares = [
        predict({"max_lag": 4, "on_stale": "mask", "max_token_age": limit}, 4 * ALL, train=2).stale_share
        for limit in (4, 6, 12, 60)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.05 and shares[-1] == 0
    dropped = predict({"max_lag": 4, "on_stale": "drop"}, 4 * ALL, train=2)
    # Whole groups go with their oldest token.
    assert dropped.stale_share > shares[0]
    assert predict({"max_lag": 4}, 4 * ALL, train=2).stale_share == 0
