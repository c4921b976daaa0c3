"""The teacher of the long example: it writes out a chain of small operations modulo 10, and errs at some of them.

From a wrong step on, everything is wrong: each operation maps different values to different values. An answer has five
tokens a step, so 48 operations make 243 tokens with the result and the end. A step repeats its operation right behind
its name, as in the prompt, so that a small model soon learns to copy it.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

# Run from its folder or imported: conversations.py is in the folder above, or where PYTHONPATH says.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from conversations import Experts, Folder, Lesson, LessonPart, Seed, Steps, Talk, cold_start

MISTAKE_SHARE = 0.03
NUM_PROMPTS, NUM_HELD_OUT = 1024, 64
# Multiplication by these alone keeps values modulo 10 apart.
FACTORS = (3, 7, 9)
APPLY: dict[str, Callable[[int, int], int]] = {
    "+": lambda value, number: (value + number) % 10,
    "-": lambda value, number: (value - number) % 10,
    "*": lambda value, number: (value * number) % 10,
}
OPENING, RESULT = "start at ", "\nanswer: "
# Tokens around the steps in prompt and answer, and a little more for answers that lose count.
SPARE_TOKENS = 16

# A short chain is a quarter of the work, and teaches all but the length.
SHORT = 10


@dataclass(frozen=True)
class Chain:
    """A chain: its first value, and the operations by their step."""

    start: int
    operations: dict[int, tuple[str, int]]


def draw_problem(draw: random.Random, steps: Sequence[int]) -> Chain:
    """Any first value, with any operation at each step."""
    signs = draw.choices("+-*", k=len(steps))
    numbers = (draw.choice(FACTORS) if sign == "*" else draw.randint(1, 9) for sign in signs)
    return Chain(draw.randrange(10), dict(zip(steps, zip(signs, numbers, strict=True), strict=True)))


def step_name(step: int) -> str:
    """The text in front of a step, in prompt and answer; one token."""
    return f"\n#{step} "


def prompt(problem: Chain) -> list[dict[str, str]]:
    """The problem as a conversation that waits for its answer."""
    steps = (f"{step_name(step)}{sign}{number}" for step, (sign, number) in problem.operations.items())
    return [{"role": "user", "content": f"{OPENING}{problem.start}{''.join(steps)}"}]


def solution(problem: Chain, draw: random.Random | None = None) -> tuple[str, str]:
    """The answer's text, and the last value. With `draw`, some steps are wrong, and the next go on from there."""
    value, text = problem.start, ""
    for step, (sign, number) in problem.operations.items():
        value = APPLY[sign](value, number)
        if draw and draw.random() < MISTAKE_SHARE:
            value = (value + draw.randint(1, 9)) % 10
        text += f"{step_name(step)}{sign}{number}={value}"
    return f"{text}{RESULT}{value}", str(value)


def record(problem: Chain) -> dict[str, Any]:
    """A problem with its last value, for the reward function."""
    return {"prompt": prompt(problem), "answer": solution(problem)[1]}


def make(
    folder: Folder,
    seed: Seed = 0,
    steps: Steps = None,
    experts: Experts = 0,
    operations: Annotated[int, typer.Option(min=5, help="Operations of a problem, of five tokens each")] = 48,
    hidden: Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 64")] = 192,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model")] = 4,
) -> None:
    """Make a small model that calculates in long answers with errors, and problems to improve it on."""

    if hidden % 64:
        raise typer.BadParameter(f"{hidden} is no multiple of 64: heads have 32 numbers, and share two key heads")
    every = range(1, operations + 1)

    def talk(draw: random.Random, length: int = operations) -> Talk:
        """Steps of the chain that follow one another, from any one on."""
        begin = draw.randint(0, operations - length)
        problem = draw_problem(draw, every[begin : begin + length])
        return Talk(prompt(problem), [solution(problem, draw)[0]], [])

    draw = random.Random(f"{seed} problems")
    records = [record(draw_problem(draw, every)) for _ in range(NUM_PROMPTS + NUM_HELD_OUT)]
    files = {"prompts.jsonl": records[NUM_HELD_OUT:], "eval.jsonl": records[:NUM_HELD_OUT]}
    parts = [LessonPart(partial(talk, length=min(SHORT, operations)), 32, share=0.6), LessonPart(talk, 12, share=0.4)]
    lengths = {"prompt_length": 3 * operations + SPARE_TOKENS, "response_length": 5 * operations + SPARE_TOKENS}
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_layers": layers,
        "num_heads": hidden // 32,
        "num_experts": experts,
        "expert_size": 128,  # many narrow experts: with 16 of them a layer has twice the weights of a dense one
        "max_length": sum(lengths.values()),
        "rope_theta": 10000.0,
    }
    words = [OPENING, RESULT, *map(step_name, every)]
    lesson = Lesson(words, parts, num_steps=steps or 240, sizes=sizes)
    cold_start(folder, lesson, files, seed, [Path(__file__).resolve()], keys={"algorithm": lengths})


if __name__ == "__main__":
    typer.run(make)
