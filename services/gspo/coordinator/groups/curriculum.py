"""The order of prompts under data.curriculum: spread. It follows from seed and log alone.

A pass over a source walks through its prompts in their shuffled order. A prompt sits the pass out if the last known
group of it had equal rewards, unless the pass is its own. Each prompt owns one in `revisit_passes` passes, and is
visited in it in any case. So each prompt has at most one visit in a pass, and at least one in `revisit_passes` passes.
The owned passes are spread evenly, so that no pass of many prompts is empty.

The groups are drawn by their numbers. For group g, the first

    max(0, g + 1 - slots - batch)

results in the log are known, and no others. So many groups have ended when g can be issued: all groups before it are
issued then, and fewer than `slots` are open. One batch less lets prompts be read before slots are free. So the draw
waits for nothing, and another process draws the same later, when the log has grown.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from gspo.common.config.schema import Config
from gspo.common.source_order import SourceOrder
from gspo.coordinator.groups.prompt_order import PromptOrder, PromptPlace

# Beside the seed, so that it differs from the passes, which are shuffled from seed and number.
_OWNED: Final = 1


class SourceVisits:
    """The visits to the prompts of one source, drawn one after the other.

    Args:
        order: The shuffled prompts of every pass.
        num_prompts: N.
        revisit_passes: A prompt with equal rewards is in one of so many passes.

    Attributes:
        num_equal: Prompts whose last known group had equal rewards.
        walked: Prompts that were visited or sat out, N in each pass.
    """

    def __init__(self, order: PromptOrder, num_prompts: int, *, seed: int, revisit_passes: int) -> None:
        self._order, self._num_prompts, self._revisit_passes = order, num_prompts, revisit_passes
        shuffled_N = np.random.default_rng((seed, 0, _OWNED)).permutation(num_prompts)
        self._owned_N = array("H", (shuffled_N % revisit_passes).astype(np.uint16).tobytes())
        self._is_equal_N = bytearray(num_prompts)
        self.num_equal = 0
        self.walked = 0

    def draw(self) -> int:
        """The place of the next prompt, 0 .. N - 1."""
        while True:
            place, number = self._order.place(self.walked), self.walked // self._num_prompts
            self.walked += 1
            if not self._is_equal_N[place] or self._owned_N[place] == number % self._revisit_passes:
                return place

    def learn(self, place: int, *, differ: bool) -> None:
        """A group of a prompt has ended: whether its rewards differed."""
        self.num_equal += (not differ) - self._is_equal_N[place]
        self._is_equal_N[place] = not differ


class Curriculum:
    """The order of the prompts of a run, with a curriculum for each source.

    Args:
        lengths: Usable prompts of each source.
    """

    num_groups = None

    def __init__(self, config: Config, lengths: Sequence[int]) -> None:
        self._config, self._lengths = config, lengths
        self._sources = SourceOrder([source.weight for source in config.sources])
        self._visits = [
            SourceVisits(
                PromptOrder(length, seed=config.seed, shuffle=config.data.shuffle),
                length,
                seed=config.seed,
                revisit_passes=config.data.revisit_passes,
            )
            for length in lengths
        ]
        # The prompt of each drawn group, and the results in the order of the log: the group, and whether its rewards
        # differed; -1 where that is not known.
        self._drawn_sources, self._drawn_places = array("B"), array("q")
        self._groups, self._differ = array("q"), array("b")
        self._num_used = 0

    @property
    def num_results(self) -> int:
        return len(self._groups)

    def needs(self, group: int) -> int:
        """Results of the log that decide about the prompt of a group."""
        return max(0, group + 1 - self._config.num_slots - self._config.algorithm.rollout_batch_size)

    def learn(self, results: Iterable[tuple[int, bool | None]]) -> None:
        """Take the next results in the order of the log: a group, and whether its rewards differed."""
        for group, differ in results:
            self._groups.append(group)
            self._differ.append(-1 if differ is None else differ)

    def place(self, group: int) -> PromptPlace:
        """The prompt of a group whose results are known."""
        while len(self._drawn_places) <= group:
            self._draw(len(self._drawn_places))
        return PromptPlace(self._drawn_sources[group], self._drawn_places[group])

    def _draw(self, group: int) -> None:
        for number in range(self._num_used, self.needs(group)):
            ended, differ = self._groups[number], self._differ[number]
            if differ >= 0:
                self._visits[self._drawn_sources[ended]].learn(self._drawn_places[ended], differ=bool(differ))
        self._num_used = max(self._num_used, self.needs(group))
        source = self._sources.place(group).source
        self._drawn_sources.append(source)
        self._drawn_places.append(self._visits[source].draw())

    def describe(self) -> list[dict[str, str | int]]:
        """Figures of each source: its name, its prompts, those whose last known group had equal rewards, its passes."""
        return [
            {"source": source.name, "prompts": length, "equal": visits.num_equal, "passes": visits.walked // length}
            for source, length, visits in zip(self._config.sources, self._lengths, self._visits, strict=True)
        ]
