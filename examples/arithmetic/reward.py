"""The reward of the arithmetic example: 1 for the exact sum, 0 for anything else.

Not a partial credit: a near miss earns nothing. Loaded by the reward service, which calls `reward`.
"""

from collections.abc import Sequence
from typing import Any


def reward(
    prompts: Sequence[Any],  # noqa: ARG001 - the calling convention hands it over by name
    completions: Sequence[Any],
    **columns: Sequence[Any],
) -> list[float]:
    """1.0 where the completion is the problem's `answer` column, else 0.0.

    A completion is text, or a list of chat messages whose last one holds the text.
    """
    return [
        float(text_of(completion) == answer) for completion, answer in zip(completions, columns["answer"], strict=True)
    ]


def text_of(completion: Any) -> str:
    """The text that the model wrote."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
