"""The teacher of the guessing example: it halves what is left at some guesses, and guesses anything at the others.

So the model learns both what to do and much that it should not do; rewards alone tell it which is which.
"""

import random
import sys
from pathlib import Path

# Run from its folder or imported: conversations.py is in the folder above, or where PYTHONPATH says.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from conversations import Lesson, Talk, cold_start, cold_start_command
from game import HIGHEST, MAX_TURNS, reset, step

GOOD_SHARE = 0.35
PROMPT = [{"role": "user", "content": f"Guess a number from 0 to {HIGHEST}."}]


def talk(draw: random.Random) -> Talk:
    """One game of the teacher."""
    state, _ = reset({"number": draw.randint(0, HIGHEST)})
    low, high, done = 0, HIGHEST, False
    made = Talk(PROMPT, [], [])
    while not done and len(made.turns) < MAX_TURNS:
        guess = (low + high) // 2 if draw.random() < GOOD_SHARE else draw.randint(0, HIGHEST)
        state, said, _, done = step(state, str(guess))
        made.turns.append(str(guess))
        made.observations.append(said)
        low, high = (max(low, guess + 1), high) if said == "higher" else (low, min(high, guess - 1))
    made.observations.pop()
    return made


def make(folder: Path, seed: int, num_steps: int | None = None) -> None:
    """The model, and a prompt for each number."""
    words = ["higher", "lower", "Guess a number from 0 to ", *(str(n) for n in range(10, HIGHEST + 1))]
    files = {"prompts.jsonl": [{"prompt": PROMPT, "number": number} for number in range(HIGHEST + 1)]}
    here = Path(__file__).resolve().parent
    cold_start(folder, Lesson(words, talk), files, seed, [here / "cold_start.py", here / "game.py"], num_steps)


if __name__ == "__main__":
    cold_start_command(make, "Makes a small model that guesses badly, and a prompt for each number.")
