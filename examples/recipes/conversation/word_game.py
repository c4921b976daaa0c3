"""An environment of several turns: guess a word by the number of letters in place.

Both functions are pure: the state is JSON, and any replica may take any step.
"""

MAX_TURNS = 6


def reset(task):
    """The prompt has explained the game."""
    return {"word": task["word"], "turns": 0}, ""


def step(state, action):
    """State, observation, reward and end of the conversation after a guess."""
    turns = state["turns"] + 1
    words = action.lower().split()
    guess = words[-1].strip(".!") if words else ""
    in_place = sum(a == b for a, b in zip(guess, state["word"], strict=False))
    if guess == state["word"]:
        return {**state, "turns": turns}, "right", 1.0 - (turns - 1) / (2 * MAX_TURNS), True
    done = turns == MAX_TURNS
    # A little for being near at the end, so that groups without a winner differ too.
    return {**state, "turns": turns}, f"{in_place} in place", 0.2 * in_place / 5 if done else 0.0, done
