"""Figures of an evaluation, by hand."""

from __future__ import annotations

import pytest

from gspo_proto.rollout_pb2 import (
    OUTCOME_EOS,
    OUTCOME_TRUNCATED,
    GroupFailure,
    Rollout,
    Score,
    Scored,
    ScoredRollout,
)
from services.coordinator.tally import Tally


def answer(group: int, number: int, score: Score, *, tokens: int = 2, label: str = "v0", cut: bool = False) -> Scored:
    outcome = OUTCOME_TRUNCATED if cut else OUTCOME_EOS
    rollout = Rollout(group=group, number=number, mask=b"\x01" * tokens, outcome=outcome, evaluation=label)
    return Scored(rollout=ScoredRollout(rollout=rollout, score=score))


def reward(value: float) -> Score:
    return Score(reward=value)


def test_figures_of_two_prompts() -> None:
    tally = Tally("v0", num_prompts=2, num_answers=2, greedy=True)
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
        "pass_at_k": 0.625,
        "response_tokens_mean": 4.0,
        "truncated_share": 0.25,
    }


def test_the_first_result_of_an_id_wins_and_other_labels_do_not_count() -> None:
    tally = Tally("v3", num_prompts=1, num_answers=1, greedy=False)
    tally.add(answer(0, 0, reward(0.5), label="v2"))
    tally.add(answer(1, 0, reward(0.5), label="v3"))
    tally.add(answer(0, 1, reward(0.5), label="v3"))
    assert len(tally) == 0
    tally.add(answer(0, 0, reward(1.0), label="v3"))
    tally.add(answer(0, 0, reward(0.0), label="v3"))
    assert tally.complete
    assert tally.figures()["sampled_mean"] == 1.0


def test_missing_and_failed_answers_are_counted_and_are_no_numbers() -> None:
    tally = Tally("v0", num_prompts=2, num_answers=3, greedy=False)
    tally.add(answer(0, 0, reward(1.0)))
    tally.add(Scored(failure=GroupFailure(group=0, attempt=3, reason="too many attempts")))
    assert tally.incomplete_groups([0, 2]) == [2]
    figures = tally.figures()
    assert (figures["num_failed"], figures["sampled_mean"], figures["pass_at_k"]) == (5.0, 1.0, 1.0)
    assert tally.failure == "too many attempts"
    assert "greedy_mean" not in figures


def test_nothing_scored_gives_no_mean() -> None:
    tally = Tally("v0", num_prompts=1, num_answers=1, greedy=True)
    assert tally.figures() == {"num_prompts": 1.0, "num_answers": 1.0, "num_failed": 2.0}
    assert list(tally.expected()) == [(0, 0), (1, 0)]
