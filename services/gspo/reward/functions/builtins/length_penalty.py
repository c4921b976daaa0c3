"""Built-in `length_penalty`: 0 up to a length, then down to -penalty at the longest one, so that endings are kept."""

from __future__ import annotations


def reward(
    completion_ids: list[list[int]], *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0
) -> list[float]:
    """Count tokens; DAPO (arXiv 2503.14476), formula 13.

    Args:
        max_tokens: From here on the whole penalty.
        buffer_tokens: The penalty begins so many tokens before that, and grows evenly.
        penalty: The largest; it is subtracted.
    """
    free = max_tokens - buffer_tokens
    shares = [min(max(len(ids) - free, 0) / max(buffer_tokens, 1), 1.0) for ids in completion_ids]
    return [-penalty * share for share in shares]
