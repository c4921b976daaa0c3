"""The tokens of a simulated answer, and a log-prob of each that only one version of the weights gives.

A check of a run's log can compute every log-prob again from token, place and weights. It sees a log-prob that was
lost, swapped or put under another version.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gspo.generation.engine.staging import PolicyCopies, PolicyCopy

# Answers are slices of one long line of tokens: to draw each anew would cost more than the rest of a rollout.
_LINE = 1 << 16
_FIRST_TEXT_TOKEN = 3
_STEPS = 1 << 16
_VALUES = (-(np.arange(_STEPS) + 1) / _STEPS).astype(np.float32)
_TOKEN_FACTOR, _PLACE_FACTOR = np.uint16(2654435761 % _STEPS), np.uint16(40503)


class Answers:
    """Makes tokens and log-probs.

    Args:
        vocabulary: Tokens that the tokenizer has; the first few are special.
    """

    def __init__(self, vocabulary: int, seed: int) -> None:
        line = np.random.default_rng(seed).integers(_FIRST_TEXT_TOKEN, vocabulary, _LINE)
        self._line = np.concatenate([line, line])

    def tokens(self, name: str, first: int, num: int) -> NDArray[np.int64]:
        """Tokens first .. first + num - 1 of the answer of this name."""
        start = int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") % _LINE
        begin = (start + first) % _LINE
        return self._line[begin : begin + num].copy()


def log_probs(token_ids: ArrayLike, first_place: int, key: int) -> NDArray[np.float32]:
    """A log-prob of each token under the weights of this key; the first stands at `first_place` of its sequence."""
    token_T = np.asarray(token_ids, np.int64).astype(np.uint16)
    place_T = np.arange(first_place, first_place + len(token_T)).astype(np.uint16)
    # 16 bits: what overflows is the remainder that is wanted.
    return _VALUES[token_T * _TOKEN_FACTOR + place_T * _PLACE_FACTOR + np.uint16(key % _STEPS)]


def key_of_bits(bits: NDArray[np.unsignedinteger[Any]]) -> int:
    """The bits of the first element, which every step changes: they stand for the weights in a log-prob."""
    return int(bits.reshape(-1)[0])


def key_of(copies: PolicyCopies, copy: PolicyCopy) -> int:
    """The key of a staged policy: that of its first tensor by name."""
    return key_of_bits(copy.bits(min(copies.places)))
