"""The files of the rounds that were played, one each, and the rounds that are still to play.

A file is written when its round has ended, under its name at once: an interrupted round has none, and is played again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.chaos.workloads import WORKLOADS
from benchmarks.harness.section import Record

if TYPE_CHECKING:  # it imports torch
    from benchmarks.chaos.rounds import Round


@dataclass(frozen=True)
class RoundName:
    """The name of a round, from which its schedule follows."""

    workload: str
    seed: int
    number: int

    def __str__(self) -> str:
        return f"{self.workload}-seed-{self.seed}-round-{self.number}"

    def file(self, results: Path) -> Path:
        """Where its result is kept."""
        return results / f"{self}.json"


def missing_rounds(results: Path, seed: int, num_rounds: Iterable[tuple[str, int]]) -> list[RoundName]:
    """The rounds without a file, of so many of each workload."""
    names = [RoundName(workload, seed, number) for workload, rounds in num_rounds for number in range(rounds)]
    return [name for name in names if not name.file(results).exists()]


def keep_round(results: Path, played: Round) -> None:
    """Write the file of a round that has ended: its fields, and `broken` with everything that went wrong."""
    file = RoundName(played.workload, played.seed, played.number).file(results)
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps({**asdict(played), "broken": played.broken}, indent=1) + "\n")
    unfinished.rename(file)


def kept_rounds(results: Path, seed: int) -> list[Record]:
    """Every kept round of a seed, workload by workload."""
    rounds: list[Record] = []
    for workload in WORKLOADS:
        files = results.glob(f"{RoundName(workload, seed, 0)}".removesuffix("0") + "*.json")
        rounds += sorted((json.loads(file.read_text()) for file in files), key=lambda played: int(played["number"]))
    return rounds
