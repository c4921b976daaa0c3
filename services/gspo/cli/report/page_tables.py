"""The tables of the report: the evaluations of each held-out file, and the rollouts that were dropped by length."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gspo.cli.report.history import RunHistory
from gspo.runlog.run_log import EvaluationRecord
from gspo.runlog.step_files import read_columns


@dataclass(frozen=True)
class EvaluationTable:
    """The evaluations of one held-out file.

    Attributes:
        file: Empty where it has no name.
        columns: Heads of the columns after the version.
        rows: (version, whether it is the best, cells) of every evaluation.
    """

    file: str
    columns: list[str]
    rows: list[tuple[int, bool, list[str]]]


def evaluation_tables(history: RunHistory) -> list[EvaluationTable]:
    """A table for each held-out file, with the columns that any of its evaluations has."""
    best = history.best[0] if history.best else None
    return [_evaluation_table(file, records, best) for file, records in history.by_file.items()]


def _evaluation_table(file: str, records: list[EvaluationRecord], best: int | None) -> EvaluationTable:
    names = dict.fromkeys(name for record in records for name in record.figures)
    ks = sorted(int(name.removeprefix("pass_at_")) for name in names if name.removeprefix("pass_at_").isdecimal())
    columns = {"sampled": ("sampled_mean", "sampled_stderr"), "greedy": ("greedy_mean", "greedy_stderr")}
    columns |= {f"pass@{k}": (f"pass_at_{k}", f"pass_at_{k}_stderr") for k in ks if k > 1}
    columns |= {name[5:-5]: (name, "") for name in names if name.startswith("part_") and name.endswith("_mean")}
    columns |= {"tokens": ("response_tokens_mean", ""), "cut off": ("truncated_share", "")}
    columns |= {"turns": ("turns_mean", ""), "tool calls": ("tool_calls_mean", "")}
    columns |= {"prompts": ("num_prompts", ""), "without a score": ("num_failed", "")}
    shown = {head: pair for head, pair in columns.items() if pair[0] in names}
    rows = [
        (
            record.version,
            record.score is not None and record.version == best,
            [_cell(record.figures, *pair) for pair in shown.values()],
        )
        for record in records
    ]
    return EvaluationTable(file, list(shown), rows)


def _cell(figures: dict[str, float], name: str, error: str) -> str:
    if name not in figures:
        return ""
    if name.startswith("num_"):
        return f"{figures[name]:,.0f}"
    if name == "truncated_share":
        return f"{figures[name]:.1%}"
    if name in ("response_tokens_mean", "turns_mean"):
        return f"{figures[name]:.1f}"
    more = f" ± {figures[error]:.3f}" if error in figures else ""
    return f"{figures[name]:.3f}{more}"


@dataclass(frozen=True)
class LengthShare:
    """The rollouts whose answer has `first` .. `last` tokens: how many were trained, how many dropped as too old."""

    first: int
    last: int
    trained: int
    dropped: int

    @property
    def share(self) -> float:
        """Share of them that was dropped."""
        return self.dropped / (self.trained + self.dropped)


def stale_by_length(history: RunHistory) -> list[LengthShare]:
    """A row for each doubling of the length that any rollout has; empty where none was dropped.

    Long answers take longest and grow too old first; a policy that never learns from them learns to be short.
    """
    if not history.groups.dropped_lengths:
        return []
    dropped = Counter(map(_doubling, history.groups.dropped_lengths))
    trained: Counter[int] = Counter()
    for path in history.step_files.values():
        trained.update(map(_doubling, _trained_lengths(path)))
    return [
        LengthShare(1 << power, (2 << power) - 1, trained[power], dropped[power])
        for power in sorted(trained.keys() | dropped.keys())
    ]


def _trained_lengths(path: Path) -> list[int]:
    """Sampled tokens of the trained rollouts of a step; none where the file cannot be read."""
    try:
        table = read_columns(path, ["version", "skipped"])
    except (OSError, ValueError):
        return []
    rows = zip(table.column("version").to_pylist(), table.column("skipped").to_pylist(), strict=True)
    return [int((np.array(version) >= 0).sum()) for version, skipped in rows if skipped is None]


def _doubling(length: int) -> int:
    return max(0, length.bit_length() - 1)
