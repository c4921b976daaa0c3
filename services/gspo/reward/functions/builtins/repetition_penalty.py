"""Built-in `repetition_penalty`: down to -penalty by the share of an answer's n-grams that occur earlier in it."""

from __future__ import annotations

from typing import Any


def reward(completions: list[Any], *, ngram: int = 3, penalty: float = 1.0) -> list[float]:
    """Compare n-grams of words, case apart.

    Args:
        ngram: Words in one.
        penalty: The largest; it is subtracted.
    """
    return [-penalty * repeated_share(text_of(text).casefold().split(), ngram) for text in completions]


def repeated_share(words: list[str], ngram: int) -> float:
    """1 - different n-grams / all n-grams; 0 if there are none."""
    ngrams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def text_of(completion: Any) -> str:
    """An answer as text, also if it is a chat message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
