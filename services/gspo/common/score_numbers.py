"""The one bound of every number that user code or a server gives: a reward, a part of one, a step of an environment.

Checked where such numbers enter, where the reward service adds them up, and where learner and coordinator read sums.
"""

from typing import Any

from gspo_proto.rollout_pb2 import Score

# float32 holds sums of a hundred million such numbers, and float64 sums of their squares (means, deviations).
LARGEST_NUMBER = 1e30
NUMBER_RULE = f"a number from -{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}"


def bounded_number(value: Any) -> float | None:
    """A number within the bound, as a float; None for anything else: text, true, NaN, infinity, 1e308, 10**400."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST_NUMBER else None


def number_fault(number: float) -> str:
    """The problem with a number, in words; empty for one within the bound."""
    if abs(number) <= LARGEST_NUMBER:
        return ""
    if abs(number) < float("inf"):
        return f"{number:g}, and rewards are {NUMBER_RULE.removeprefix('a number ')}"
    return "infinity" if number > 0 else "minus infinity" if number < 0 else "NaN"


def reward_or_failure(score: Score) -> tuple[float | None, str | None]:
    """The reward of a score, or the reason why it has none; one of the two is None."""
    if score.HasField("failure"):
        return None, score.failure
    if not score.HasField("reward"):
        return None, "the score has neither a reward nor a failure"
    if fault := number_fault(score.reward):
        return None, f"the reward is {fault}"
    return score.reward, None
