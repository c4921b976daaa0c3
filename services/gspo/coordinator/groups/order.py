"""The prompt order: the prompt of each group, without end unless epochs are bounded."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


class PromptOrder:
    """Group g is the prompt at place g % N of pass g // N; every pass is shuffled from (seed, pass).

    Args:
        num_prompts: N.
        shuffle: False keeps the file's order in every pass.
        total_epochs: Passes after which no group is left; None is endless. A part of a pass is rounded to whole groups.
    """

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool, total_epochs: float | None) -> None:
        self._num_prompts, self._seed, self._shuffle = num_prompts, seed, shuffle
        self.num_groups = None if total_epochs is None else max(1, round(num_prompts * total_epochs))
        # Two passes are in use where one ends. A pass over a large data set takes megabytes, so no more are kept.
        self._pass = lru_cache(maxsize=2)(self._shuffled)

    def place(self, group: int) -> int:
        """Place of the group's prompt among the usable prompts, 0 .. N - 1."""
        number, place = divmod(group, self._num_prompts)
        return int(self._pass(number)[place]) if self._shuffle else place

    def _shuffled(self, number: int) -> np.ndarray:
        return np.random.default_rng((self._seed, number)).permutation(self._num_prompts)
