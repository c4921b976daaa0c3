"""The arithmetic problems: which there are, which are held out, and what a near miss is.

Not a tokenizer and not a model: numbers, chat messages and JSONL only.
Read by cold_start.py (files) and near_miss.py (training data).
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

LIMIT = 50
NUM_HELD_OUT = 250
EXACT_SHARE = 0.42  # above the 0.145 of each miss: the exact answer is the likeliest of a model that has learned this
MISSES = (-2, -1, 1, 2)

Problem = tuple[int, int]


class Message(TypedDict):
    """One chat message, as chat templates read it."""

    role: str
    content: str


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """All a + b with a, b < LIMIT in the seed's order: (training problems, held-out problems).

    The first is for the cold start and for reinforcement learning, the second for measuring alone.
    """
    problems = [(a, b) for a in range(LIMIT) for b in range(LIMIT)]
    random.Random(seed).shuffle(problems)
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]


def chat_prompt(problem: Problem) -> list[Message]:
    """The problem as a conversation that waits for its answer."""
    a, b = problem
    return [{"role": "user", "content": f"{a}+{b}="}]


def near_miss(problem: Problem, miss: int) -> int:
    """The sum, off by `miss`; a miss that would be negative counts upwards, so that it stays a miss."""
    total = sum(problem)
    return total + miss if total + miss >= 0 else total - miss


def write_jsonl(path: Path, problems: Sequence[Problem]) -> None:
    """One line a problem: `prompt` (chat messages) and `answer` (text, for the reward function)."""
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            file.write(json.dumps({"prompt": chat_prompt(problem), "answer": str(sum(problem))}) + "\n")
