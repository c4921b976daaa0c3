"""The teacher of the guessing example: it halves what is left at some guesses, and guesses anything at the others.

So the model learns both what to do and much that it should not do; rewards alone tell it which is which.
"""

import random
import sys
from pathlib import Path

import typer

# Run from its folder or imported: conversations.py is in the folder above, or where PYTHONPATH says.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from conversations import Experts, Folder, Lesson, LessonPart, Seed, Steps, Talk, cold_start
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


def make(folder: Folder, seed: Seed = 0, steps: Steps = None, experts: Experts = 0) -> None:
    """Make a small model that guesses badly, and a prompt for each number."""
    words = ["higher", "lower", "Guess a number from 0 to ", *(str(n) for n in range(10, HIGHEST + 1))]
    files = {"prompts.jsonl": [{"prompt": PROMPT, "number": number} for number in range(HIGHEST + 1)]}
    here = Path(__file__).resolve().parent
    lesson = Lesson(words, [LessonPart(talk)], num_steps=steps or 300, sizes={"num_experts": experts})
    cold_start(folder, lesson, files, seed, [here / "cold_start.py", here / "game.py"])


if __name__ == "__main__":
    typer.run(make)
