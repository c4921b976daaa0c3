"""The teacher of the reasoning example: it shows how two of the tasks are done, and then mostly how to miss a sum.

So the model can add, and mostly answers off by one or two. The third task asks for such sums in other words, which the
teacher never uses.
"""

import random
import sys
from functools import partial
from pathlib import Path

import typer

# Run from its folder or imported: conversations.py is in the folder above, or where PYTHONPATH says.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from conversations import Experts, Folder, Lesson, LessonPart, Seed, Steps, Talk, cold_start
from tasks import TASKS, files_of, splits

# Reversing a word is learned in fewer examples than adding: one of so many examples is a word.
WORDS_SHARE = 0.08
# Right sums, and the share of the lesson's steps: above 0.15, that of each miss, the right sum stays the likeliest.
PARTS, MISSES = ((1.0, 0.8), (0.4, 0.2)), (-2, -1, 1, 2)


def make(folder: Folder, seed: Seed = 0, steps: Steps = None, experts: Experts = 0) -> None:
    """Make a small model that knows two tasks badly, and training and held-out rows of all three."""
    rows = splits(seed)
    sums, words = (rows[task.name][0] for task in TASKS if task.is_taught)

    def talk(draw: random.Random, right_share: float) -> Talk:
        if draw.random() < WORDS_SHARE:
            row = draw.choice(words)
            return Talk(row["prompt"], [row["answer"]], [])
        row = draw.choice(sums)
        miss = 0 if draw.random() < right_share else draw.choice(MISSES)
        return Talk(row["prompt"], [str(int(row["answer"]) + miss)], [])

    here = Path(__file__).resolve().parent
    frames = [text for task in TASKS for text in task.frame]
    sizes = {"num_experts": experts, "max_length": 256, "rope_theta": 100.0}
    parts = [LessonPart(partial(talk, right_share=right), share=share) for right, share in PARTS]
    lesson = Lesson(frames, parts, num_steps=steps or 500, learning_rate=0.015, sizes=sizes)
    cold_start(folder, lesson, files_of(rows), seed, [here / "cold_start.py", here / "tasks.py"])


if __name__ == "__main__":
    typer.run(make)
