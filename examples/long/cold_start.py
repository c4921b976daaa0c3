"""The teacher of the long example: it continues a sequence of digits by written sums, and errs at some of them.

Each digit is the sum, modulo 10, of the last one and the one three places back. From a wrong sum on, the last three
digits are never the right ones, but for a second mistake: they determine the digit before them. An answer has six
tokens a sum, so 40 of them make 245 tokens with the result and the end.

Both numbers of a sum are at a fixed distance before it, so a small model learns the form within minutes. The result is
three digits, so an answer of wrong sums has a right one only by a chance of 1 in 1,000.
"""

import random
import sys
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

# Run from its folder or imported: conversations.py is in the folder above, or where PYTHONPATH says.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from conversations import Experts, Folder, Lesson, LessonPart, Seed, Steps, Talk, cold_start

MISTAKE_SHARE = 0.03
NUM_HELD_OUT = 64
OPENING, RESULT = "start at ", "\nanswer: "
# Tokens around the sums in prompt and answer, and a little more for answers that lose count.
SPARE_TOKENS = 16

# A short sequence is a quarter of the work, and teaches all but the count.
SHORT = 10


@dataclass(frozen=True)
class DigitProblem:
    """A sequence to continue: its three first digits, and the first and last number of the sums."""

    digits: tuple[int, int, int]
    first: int
    last: int


def sum_name(number: int) -> str:
    """The text in front of a sum, which the prompt has for the first one; one token."""
    return f"\n#{number} "


def prompt(problem: DigitProblem) -> list[dict[str, str]]:
    """The problem as a conversation that waits for its answer."""
    digits = "".join(map(str, problem.digits))
    return [{"role": "user", "content": f"{OPENING}{digits}{sum_name(problem.first)}"}]


def solution(problem: DigitProblem, draw: random.Random | None = None) -> tuple[str, str]:
    """The answer's text, and the last three digits. With `draw`, some sums are wrong, and the next go on from there."""
    digits, text = list(problem.digits), ""
    for number in range(problem.first, problem.last + 1):
        back, last = digits[-3], digits[-1]
        value = (last + back) % 10
        if draw and draw.random() < MISTAKE_SHARE:
            value = (value + draw.randint(1, 9)) % 10
        digits.append(value)
        text += f"{sum_name(number)}{last}+{back}={value}"
    result = "".join(map(str, digits[-3:]))
    return f"{text}{RESULT}{result}", result


def record(problem: DigitProblem) -> dict[str, Any]:
    """A problem with its result, for the reward function."""
    return {"prompt": prompt(problem), "answer": solution(problem)[1]}


def make(
    folder: Folder,
    seed: Seed = 0,
    steps: Steps = None,
    experts: Experts = 0,
    sums: Annotated[int, typer.Option(min=5, help="Sums of an answer, of six tokens each")] = 40,
    varied: Annotated[bool, typer.Option(help="Half of the problems have the last ten sums alone")] = False,
    hidden: Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 64")] = 192,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model")] = 4,
) -> None:
    """Make a small model that adds in long answers with errors, and problems to improve it on."""

    if hidden % 64:
        raise typer.BadParameter(f"{hidden} is no multiple of 64: heads have 32 numbers, and share two key heads")

    short = min(SHORT, sums)

    def problem_length(draw: random.Random) -> int:
        return draw.choice((short, sums)) if varied else sums

    def talk(draw: random.Random, length: int = 0) -> Talk:
        """A conversation of so many sums; of as many as a problem of training where `length` is 0."""
        digits = draw.randrange(10), draw.randrange(10), draw.randrange(10)
        problem = DigitProblem(digits, sums - (length or problem_length(draw)) + 1, sums)
        return Talk(prompt(problem), [solution(problem, draw)[0]], [])

    # Zeros stay zeros.
    starts: list[tuple[int, int, int]] = list(product(range(10), range(10), range(10)))[1:]
    draw = random.Random(f"{seed} problems")
    draw.shuffle(starts)
    records = [record(DigitProblem(digits, sums - problem_length(draw) + 1, sums)) for digits in starts]
    files = {"prompts.jsonl": records[NUM_HELD_OUT:], "eval.jsonl": records[:NUM_HELD_OUT]}
    parts = [LessonPart(partial(talk, length=short), 32, share=0.6), LessonPart(talk, 12, share=0.4)]
    lengths = {"prompt_length": 2 * SPARE_TOKENS, "response_length": 6 * sums + SPARE_TOKENS}
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
    words = [OPENING, RESULT, *map(sum_name, range(1, sums + 1))]
    lesson = Lesson(words, parts, num_steps=steps or 240, sizes=sizes)
    cold_start(folder, lesson, files, seed, [Path(__file__).resolve()], keys={"algorithm": lengths})


if __name__ == "__main__":
    typer.run(make)
