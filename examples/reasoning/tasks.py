"""The tasks of the reasoning example: which of reasoning-gym's they are, how hard, and which rows are held out.

Not a tokenizer and not a model: records of JSONL only. Read by cold_start.py; reward.py scores them.

Row i of seed s is drawn from the number s + i alone, so row i of seed s + 1 is row i + 1 of seed s. Held-out rows are
of numbers far from those of training rows. The same sum may be drawn twice: held-out sums and words are never trained.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import reasoning_gym
import typer
from reasoning_gym.utils import SYSTEM_PROMPTS

Row = dict[str, Any]
Split = tuple[list[Row], list[Row]]

NUM_TRAINED, NUM_HELD_OUT = 8000, 200
# Of the training rows, those of the run. It visits 16 of a task in a step and passes over them three times in 200: a
# curriculum needs passes.
NUM_PROMPTS = 1000
# Numbers of one seed of the example: training rows begin at the first, held-out rows in the middle.
SPAN = 10_000_000


@dataclass(frozen=True)
class GymTask:
    """A task of reasoning-gym.

    Attributes:
        keys: Those of its configuration.
        frame: The parts of a question that all questions share.
        is_taught: Whether the cold start has seen it.
    """

    name: str
    keys: dict[str, Any]
    frame: tuple[str, ...]
    is_taught: bool = True


TASKS = (
    GymTask(
        "chain_sum",
        {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
        ("State the final answer to the following arithmetic problem: ",),
    ),
    GymTask(
        "spell_backward",
        {"min_word_len": 4, "max_word_len": 10},
        ("Spell this word backward (example: sun -> nus): ",),
    ),
    GymTask(
        "basic_arithmetic",
        {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 2,
            "max_digits": 2,
            "operators": ("+", "-"),
            "allow_parentheses": False,
            "allow_negation": False,
        },
        ("Calculate ",),
        is_taught=False,
    ),
)


def rows(task: GymTask, seed: int, size: int) -> list[Row]:
    """Rows of a task as records with the columns prompt, answer and metadata."""
    dataset = reasoning_gym.create_dataset(task.name, seed=seed, size=size, **task.keys)
    return [
        {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
        }
        for entry in (dataset[index] for index in range(size))
    ]


def splits(seed: int, tasks: Sequence[GymTask] = TASKS) -> dict[str, Split]:
    """Training rows and held-out rows of each task, each once. No held-out sum is trained in any task."""
    held_out = {task.name: unique(rows(task, seed * SPAN + SPAN // 2, NUM_HELD_OUT)) for task in tasks}
    kept = {exercise(row) for records in held_out.values() for row in records}
    return {
        task.name: (
            [row for row in unique(rows(task, seed * SPAN, NUM_TRAINED)) if exercise(row) not in kept],
            held_out[task.name],
        )
        for task in tasks
    }


def exercise(row: Row) -> str:
    """The sum without the words of its task, or else the question."""
    return str(row["metadata"].get("expression") or row["prompt"][0]["content"])


def unique(records: list[Row]) -> list[Row]:
    """The first row of each exercise."""
    return list({exercise(row): row for row in reversed(records)}.values())[::-1]


def files_of(rows_by_task: Mapping[str, Split]) -> dict[str, list[Row]]:
    """Rows by the name of the file that the configurations read; of training rows the first NUM_PROMPTS."""
    trained = {f"{name}.jsonl": rows[0][:NUM_PROMPTS] for name, rows in rows_by_task.items()}
    return trained | {f"{name}-eval.jsonl": rows[1] for name, rows in rows_by_task.items()}


def write_own_sizes(
    folder: Annotated[Path, typer.Argument(help="Folder for the files; it is made")],
    seed: Annotated[int, typer.Option(min=0, help="Of the rows")] = 0,
) -> None:
    """Write rows of the three tasks at the package's own sizes, with its system prompt, for qwen3.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    system = {"role": "system", "content": SYSTEM_PROMPTS["default"]}
    for name, records in files_of(splits(seed, [replace(task, keys={}) for task in TASKS])).items():
        asked = [{**row, "prompt": [system, *row["prompt"]]} for row in records]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
        print(f"{folder / name}: {len(records)} rows")


if __name__ == "__main__":
    typer.run(write_own_sizes)
