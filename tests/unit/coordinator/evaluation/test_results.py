"""Figures of an evaluation, by hand."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import fmean

import pytest

from gspo.common.config.evaluation import EvaluationConfig
from gspo.coordinator.evaluation.results import EvaluationResults, best_of
from gspo_proto.rollout_pb2 import (
    OUTCOME_EOS,
    OUTCOME_TRUNCATED,
    GroupFailure,
    Rollout,
    Score,
    Scored,
    ScoredRollout,
    ScorePart,
)


def answer(
    group: int,
    number: int,
    score: Score,
    *,
    tokens: int = 2,
    label: str = "v0",
    cut: bool = False,
    version: int = 0,
) -> Scored:
    rollout = Rollout(
        group=group,
        number=number,
        mask=b"\x01" * tokens,
        version=[version] * tokens,
        outcome=OUTCOME_TRUNCATED if cut else OUTCOME_EOS,
        evaluation=label,
    )
    return Scored(rollout=ScoredRollout(rollout=rollout, score=score))


def tally_of(
    num_prompts: int, num_answers: int, *, greedy: bool = False, version: int = 0, **more: float
) -> EvaluationResults:
    return EvaluationResults(
        f"v{version}",
        version,
        num_prompts,
        EvaluationConfig(prompts=Path("e.jsonl"), num_answers=num_answers, greedy=greedy, **more),
    )


def reward(value: float) -> Score:
    return Score(reward=value)


def test_figures_of_two_prompts() -> None:
    tally = tally_of(2, 2, greedy=True)
    assert tally.num_expected == 6
    entries = [
        answer(0, 0, reward(1.0), tokens=4),
        answer(0, 1, reward(0.0), tokens=8, cut=True),
        answer(1, 0, reward(1.0), tokens=100),
        answer(2, 0, reward(0.25), tokens=2),
        answer(2, 1, Score(failure="raised ValueError"), tokens=2),
        answer(3, 0, reward(0.0), tokens=100),
    ]
    for entry in entries:
        assert not tally.complete
        tally.add(entry)
    assert tally.complete
    assert tally.failure == "raised ValueError"
    assert tally.figures() == {
        "num_prompts": 2.0,
        "num_answers": 2.0,
        "num_failed": 1.0,
        "sampled_mean": pytest.approx(1.25 / 3),
        "sampled_stderr": pytest.approx(0.125),  # of 0.5 and 0.25
        "greedy_mean": 0.5,
        "greedy_stderr": pytest.approx(0.5),  # of 1 and 0
        "pass_at_1": 0.25,  # one of two, none of one
        "pass_at_1_stderr": pytest.approx(0.25),
        "pass_at_2": 1.0,  # of the first prompt alone: the other has one score
        "best_at_2": 1.0,
        "response_tokens_mean": 4.0,
        "truncated_share": 0.25,
        "eos_share": 0.75,
        "zero_spread_groups": 0.0,  # of the first prompt alone
        "greedy_response_tokens_mean": 100.0,
        "greedy_truncated_share": 0.0,
    }


def test_the_first_result_of_an_id_wins_and_other_labels_do_not_count() -> None:
    tally = tally_of(1, 1, version=3)
    tally.add(answer(0, 0, reward(0.5), label="v2"))
    tally.add(answer(1, 0, reward(0.5), label="v3"))
    tally.add(answer(0, 1, reward(0.5), label="v3"))
    assert len(tally) == 0
    tally.add(answer(0, 0, reward(1.0), label="v3"))
    tally.add(answer(0, 0, reward(0.0), label="v3"))
    assert tally.complete
    assert tally.figures()["sampled_mean"] == 1.0


def test_missing_and_failed_answers_are_counted_and_are_no_numbers() -> None:
    tally = tally_of(2, 3)
    tally.add(answer(0, 0, reward(1.0)))
    tally.add(Scored(failure=GroupFailure(group=0, attempt=3, reason="too many attempts")))
    assert tally.incomplete_groups([0, 2]) == [2]
    figures = tally.figures()
    assert (figures["num_failed"], figures["sampled_mean"], figures["pass_at_1"]) == (5.0, 1.0, 1.0)
    assert tally.failure == "too many attempts"
    assert not {"greedy_mean", "pass_at_2", "pass_at_3", "best_at_3"} & figures.keys()


def test_a_reward_beyond_the_bound_is_a_failed_score() -> None:
    tally = tally_of(1, 2)
    tally.add(answer(0, 0, reward(1e308)))
    tally.add(answer(0, 1, reward(1e308)))
    figures = tally.figures()
    assert figures["num_failed"] == 2.0
    assert "sampled_mean" not in figures
    assert tally.failure == "the reward is 1e+308, and rewards are from -1e+30 to 1e+30"


def test_nothing_scored_gives_no_mean() -> None:
    tally = tally_of(1, 1, greedy=True)
    assert tally.figures() == {"num_prompts": 1.0, "num_answers": 1.0, "num_failed": 2.0}
    assert list(tally.expected()) == [(0, 0), (1, 0)]


def test_a_threshold_says_what_passes_and_the_first_prompts_can_be_taken_alone() -> None:
    tally = tally_of(2, 2, pass_reward=0.5)
    for number, value in enumerate((0.5, 0.25)):
        tally.add(answer(0, number, reward(value)))
        tally.add(answer(2, number, reward(0.0)))
    assert (tally.figures()["pass_at_1"], tally.figures()["pass_at_2"], tally.figures()["best_at_2"]) == (
        0.25,
        0.5,
        0.25,
    )
    first = tally.figures(first=1)
    assert (first["num_prompts"], first["num_failed"], first["pass_at_2"], first["sampled_mean"]) == (1, 0, 1, 0.375)
    assert "sampled_stderr" not in first


def test_parts_of_the_reward_have_their_means() -> None:
    tally = tally_of(1, 2)
    for number, (right, form) in enumerate(((1.0, 0.5), (0.0, 1.0))):
        parts = [ScorePart(name="right", value=right, weight=1.0), ScorePart(name="form", value=form, weight=0.1)]
        tally.add(answer(0, number, Score(reward=right + 0.1 * form, parts=parts)))
    figures = tally.figures()
    assert (figures["part_right_mean"], figures["part_form_mean"]) == (0.5, 0.75)


def test_newer_weights_that_took_part_are_a_figure() -> None:
    tally = tally_of(1, 2, version=3)
    tally.add(answer(0, 0, reward(1.0), label="v3", version=3))
    assert "newest_version" not in tally.figures()
    tally.add(answer(0, 1, reward(1.0), label="v3", version=5))
    assert tally.figures()["newest_version"] == 5.0


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
