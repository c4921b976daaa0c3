"""The results of settled groups in the order of the log: whether the rewards of each differed. They only grow.

The coordinator draws the prompts of a curriculum from them. run_directory.py makes them from its files.
"""

from array import array
from collections.abc import Iterable
from typing import Any

from gspo_proto.learner_pb2 import (
    REWARD_SPREAD_DIFFERENT,
    REWARD_SPREAD_EQUAL,
    REWARD_SPREAD_UNSPECIFIED,
    ResultsReply,
)

# A page takes half a megabyte.
_PAGE = 65536
# Rollouts of a trained group whose rewards count. A stale one has no token left to train, and a reward like the others.
_COUNTED = (None, "stale")
_SPREADS = {None: REWARD_SPREAD_UNSPECIFIED, False: REWARD_SPREAD_EQUAL, True: REWARD_SPREAD_DIFFERENT}


class GroupResults:
    """Group and spread of each settled group; a run of a million groups takes nine megabytes."""

    def __init__(self) -> None:
        self._groups, self._spreads = array("q"), array("b")

    def add(self, results: Iterable[tuple[int, bool | None]]) -> None:
        """Add groups, each with whether its rewards differed; None where it failed or was never scored."""
        for group, differ in results:
            # The group last: its number says how many a reader in another thread may take.
            self._spreads.append(_SPREADS[differ])
            self._groups.append(group)

    def page(self, run: str, first: int) -> ResultsReply:
        """The results from place `first` on, 65,536 at most."""
        groups = self._groups[first : first + _PAGE]
        spreads: Any = self._spreads[first : first + len(groups)]
        return ResultsReply(run=run, groups=groups, spreads=spreads)


def rewards_differ(rollouts: Iterable[tuple[int, float | None, str | None, float | None]]) -> dict[int, bool]:
    """Group -> whether its counted rewards differ, by the number of the group.

    Args:
        rollouts: Group, reward, `skipped` and advantage of the rows of a step. A skipped row with an advantage counts:
            only its loss is masked.
    """
    rewards: dict[int, set[float | None]] = {}
    for group, reward, skipped, advantage in rollouts:
        counted = rewards.setdefault(group, set())
        if skipped in _COUNTED or advantage is not None:
            counted.add(reward)
    return {group: len(rewards[group]) > 1 for group in sorted(rewards)}
