"""The reward of the reasoning example: reasoning-gym's own score of an answer, between 0 and 1.

Each task scores in its own way: half of a word spelt backward is worth half. Of a text with <answer> tags, as the
package's system prompts ask for it, the tags' content is scored. Loaded by the reward service's sandbox.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer


@cache
def scorer(task: str) -> Callable[..., float]:
    """A task's `score_answer`. To make one reads the task's list of words, so each is made once."""
    return reasoning_gym.get_score_answer_fn(task)


def reward(
    completions: Sequence[Any], answer: Sequence[str], metadata: Sequence[dict[str, Any]], **_columns: Any
) -> list[float]:
    """The score of each completion, a list of chat messages whose last one is the answer."""
    texts = (completion[-1]["content"] for completion in completions)
    return [
        float(scorer(row["source_dataset"])(extract_answer(text) or text, {"answer": right, "metadata": row}))
        for text, right, row in zip(texts, answer, metadata, strict=True)
    ]
