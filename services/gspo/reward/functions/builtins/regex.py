"""Built-in `regex`: 1 if a pattern matches the answer, else 0: tags in their order, one boxed answer."""

from __future__ import annotations

from typing import Any

import regex


def reward(completions: list[Any], *, pattern: str, full: bool = False) -> list[float]:
    """Match each answer.

    Args:
        pattern: By the rules of the `regex` package; . matches line ends too.
        full: The whole answer must match; else it is searched.
    """
    compiled = regex.compile(pattern, regex.DOTALL)
    match = compiled.fullmatch if full else compiled.search
    return [float(match(text_of(completion)) is not None) for completion in completions]


def text_of(completion: Any) -> str:
    """An answer as text, also if it is a chat message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
