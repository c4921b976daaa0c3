"""When a run is paused because its scores fail."""

from __future__ import annotations

from gspo.reward.scoring.consumer import FailureWindow
from gspo_proto.rollout_pb2 import Score

GOOD = Score(reward=0.0)


def bad(kind: str, text: str) -> Score:
    return Score(failure=text, failure_kind=kind)


def test_a_larger_share_of_a_full_window_is_a_problem_with_the_last_error() -> None:
    window = FailureWindow(4, 0.5)
    outcomes = [bad("timeout", "r: slow"), GOOD, bad("exception", "r: x"), bad("exception", "r: raised KeyError: 'y'")]
    problems = [window.add(score) for score in outcomes]
    assert problems[:3] == [None] * 3
    assert problems[3] == (
        "75% of the last 4 scores failed (2 exception, 1 timeout), more than reward.max_failure_share 0.5; "
        "the last one: r: raised KeyError: 'y'"
    )


def test_a_zero_is_a_score_and_half_is_not_more_than_half() -> None:
    window = FailureWindow(4, 0.5)
    assert [window.add(score) for score in (GOOD, bad("crash", "a"), GOOD, bad("crash", "b"))] == [None] * 4
    assert window.add(GOOD) is None


def test_after_a_problem_a_window_fills_anew() -> None:
    window = FailureWindow(2, 0.5)
    problems = [window.add(bad("crash", "a")) is not None for _ in range(6)]
    assert problems == [False, True, False, True, False, True]


def test_a_share_of_one_is_never_a_problem() -> None:
    window = FailureWindow(2, 1.0)
    assert [window.add(bad("crash", "a")) for _ in range(4)] == [None] * 4
