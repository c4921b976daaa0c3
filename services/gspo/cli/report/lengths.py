"""Which lengths a run lost to age: rollouts trained on and dropped, by the tokens of the answer.

Long answers take longest and so grow too old first; a policy that never learns from them learns to be short.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gspo.cli.report.history import RunHistory
from gspo.runlog.step_files import read_columns


@dataclass(frozen=True)
class LengthShare:
    """Rollouts whose answer has `first` .. `last` tokens: how many were trained on, and how many dropped as too old."""

    first: int
    last: int
    trained: int
    dropped: int

    @property
    def share(self) -> float:
        """Of them all, those that were dropped."""
        return self.dropped / (self.trained + self.dropped)


def stale_by_length(log: RunHistory) -> list[LengthShare]:
    """A row for each doubling of the length, where there are any; empty where nothing was dropped."""
    if not log.groups.dropped_lengths:
        return []
    dropped = Counter(map(_doubling, log.groups.dropped_lengths))
    trained: Counter[int] = Counter()
    for path in log.step_files.values():
        trained.update(map(_doubling, _lengths(path)))
    return [
        LengthShare(1 << power, (2 << power) - 1, trained[power], dropped[power])
        for power in sorted(trained.keys() | dropped.keys())
    ]


def _lengths(path: Path) -> list[int]:
    """Sampled tokens of the rollouts of a step that were trained on; none where the file cannot be read."""
    try:
        table = read_columns(path, ["version", "skipped"])
    except (OSError, ValueError):
        return []
    rows = zip(table.column("version").to_pylist(), table.column("skipped").to_pylist(), strict=True)
    return [int((np.array(version) >= 0).sum()) for version, skipped in rows if skipped is None]


def _doubling(length: int) -> int:
    return max(0, length.bit_length() - 1)
