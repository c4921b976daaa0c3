"""The prompt of each group: the source by the group's number, the prompt by the number of the group in its source.

curriculum.py has the order that also follows the rewards. tasks.py reads the prompts.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from gspo.common.config.schema import Config
from gspo.common.source_order import SourceOrder


class PromptPlace(NamedTuple):
    """The prompt of a group.

    Attributes:
        source: Index of its source.
        place: Among the usable prompts of the source, from 0.
    """

    source: int
    place: int


class PromptOrder:
    """The prompt of each group of one source, without end.

    Its group g is the prompt at place g % N of pass g // N; every pass is shuffled from (seed, pass).

    Args:
        num_prompts: N.
        shuffle: False keeps the file's order in every pass.
    """

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool) -> None:
        self._num_prompts, self._seed, self._shuffle = num_prompts, seed, shuffle
        # Two passes are in use where one ends. A pass over a large data set takes megabytes, so no more are kept.
        self._pass = lru_cache(maxsize=2)(self._shuffled)

    def place(self, group: int) -> int:
        """Place of the prompt of the source's group among the usable prompts, 0 .. N - 1."""
        number, place = divmod(group, self._num_prompts)
        return int(self._pass(number)[place]) if self._shuffle else place

    def _shuffled(self, number: int) -> np.ndarray:
        return np.random.default_rng((self._seed, number)).permutation(self._num_prompts)


class FixedOrder:
    """The order that follows from seed and numbers alone: every pass over a source has all its prompts.

    Args:
        lengths: Usable prompts of each source.

    Attributes:
        num_groups: Groups that exist in all; None is endless. run.total_epochs passes are as many times the prompts of
            all sources together, rounded to whole groups.
        num_results: Results that it knows.
    """

    num_results = 0

    def __init__(self, config: Config, lengths: Sequence[int]) -> None:
        self._sources = SourceOrder([source.weight for source in config.sources])
        self._of_source = [PromptOrder(length, seed=config.seed, shuffle=config.data.shuffle) for length in lengths]
        epochs = config.run.total_epochs
        self.num_groups = None if epochs is None else max(1, round(sum(lengths) * epochs))

    def place(self, group: int) -> PromptPlace:
        source, number = self._sources.place(group)
        return PromptPlace(source, self._of_source[source].place(number))

    def needs(self, _group: int) -> int:
        return 0

    def learn(self, results: Iterable[tuple[int, bool | None]]) -> None:
        """Nothing follows from them."""

    def describe(self) -> list[dict[str, str | int]]:
        """Empty: there is no curriculum."""
        return []
