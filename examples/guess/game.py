"""The environment of the guessing example: a number from 0 to 31, and `higher` or `lower` for each guess.

What the policy is worth says the last step: 1 for a right first guess, a sixteenth less for each further one.
"""

from typing import Any

HIGHEST, MAX_TURNS = 31, 16


def reset(task: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The prompt has said everything."""
    return {"number": task["number"], "turns": 0}, ""


def step(state: dict[str, Any], action: str) -> tuple[dict[str, Any], str, float, bool]:
    """What a guess is answered with."""
    turns = state["turns"] + 1
    state = {**state, "turns": turns}
    if not action.isascii() or not action.isdigit():
        return state, "a number", 0.0, False
    guess = int(action[:9])
    if guess == state["number"]:
        return state, "right", 1.0 - (turns - 1) / MAX_TURNS, True
    return state, "higher" if guess < state["number"] else "lower", 0.0, False
