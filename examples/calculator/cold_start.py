"""The teacher of the calculator example: it multiplies with its tool at times, and else says any number.

Some of its calls are malformed, and some of its answers are not what the tool said.
"""

import random
import sys
from pathlib import Path
from typing import Any

import typer

# Run from its folder or imported: conversations.py is in the folder above, or where PYTHONPATH says.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from conversations import Experts, Folder, Lesson, LessonPart, Seed, Steps, Talk, cold_start

from gspo.common.config.reward import BUILTIN_TOOLS

TOOL_SHARE, MALFORMED_SHARE, COPIED_SHARE = 0.3, 0.15, 0.8
OPENING, CLOSING = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
NUM_HELD_OUT = 64
# What the generator answers to a call that is no JSON.
UNREADABLE = (
    'error: the tool call cannot be read; write <tool_call>\n{"name": NAME, "arguments": {NAME: VALUE}}\n</tool_call>'
)


def problems(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Products of two-digit numbers: to train on, and held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    return pairs[NUM_HELD_OUT:], pairs[:NUM_HELD_OUT]


def record(a: int, b: int) -> dict[str, Any]:
    """A problem with its answer, for the reward function."""
    return {"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)}


def teacher(pairs: list[tuple[int, int]]) -> Any:
    """What draws a conversation about one of these."""

    def talk(draw: random.Random) -> Talk:
        a, b = draw.choice(pairs)
        made = Talk(record(a, b)["prompt"], [], [])
        anything = str(draw.randint(100, 9801))
        if draw.random() >= TOOL_SHARE:
            made.turns.append(anything)
            return made
        if draw.random() < MALFORMED_SHARE:
            made.turns.append(f"{OPENING}{a}*{b}\n</tool_call>")
            made.observations.append([{"role": "tool", "content": UNREADABLE}])
        made.turns.append(f"{OPENING}{a}*{b}{CLOSING}")
        made.observations.append([{"role": "tool", "name": "calculator", "content": str(a * b)}])
        made.turns.append(str(a * b) if draw.random() < COPIED_SHARE else anything)
        return made

    return talk


def make(folder: Folder, seed: Seed = 0, steps: Steps = None, experts: Experts = 0) -> None:
    """Make a small model that seldom uses its tool, and products to improve it on."""
    training, held_out = problems(seed)
    files = {"prompts.jsonl": [record(*p) for p in training], "eval.jsonl": [record(*p) for p in held_out]}
    lesson = Lesson(
        [OPENING, CLOSING, UNREADABLE, "\n</tool_call>"],
        [LessonPart(teacher(training))],
        [BUILTIN_TOOLS["calculator"]],
        role="tool",
        num_steps=steps or 300,
        sizes={"num_experts": experts},
    )
    cold_start(folder, lesson, files, seed, [Path(__file__).resolve()])


if __name__ == "__main__":
    typer.run(make)
