"""Texts of the policy in the rollout of an agent, to compare with those that the agent has read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tests.support.tiny_model import make_tokenizer

_TOKENIZER = make_tokenizer()


def sampled_texts(token_ids: Sequence[int], is_sampled: Sequence[int], branch_starts: Sequence[int]) -> list[str]:
    """The text of each unbroken run of sampled tokens within a branch, which is one answer."""
    changes = [place + 1 for place, (before, behind) in enumerate(pairwise(is_sampled)) if before != behind]
    bounds = sorted({0, *changes, *branch_starts, len(is_sampled)})
    runs = [token_ids[first:last] for first, last in pairwise(bounds) if is_sampled[first]]
    return [_TOKENIZER.decode(list(run), skip_special_tokens=True).strip() for run in runs]
