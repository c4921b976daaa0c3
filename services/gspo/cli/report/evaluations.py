"""The evaluations in the report: the table of every one, and what is drawn of them.

No numbers are made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import PercentFormatter

from gspo.cli.monitor.view import largest_pass
from gspo.cli.report.history import RunHistory
from gspo.cli.report.panels import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, legend, line, panels
from gspo.runlog.run_log import EvaluationRecord

_COLOURS = (BLUE, GREEN, PURPLE, ORANGE)
_MARKERS = ("o", "s", "^", "v")


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


def evaluation_tables(log: RunHistory) -> list[EvaluationTable]:
    """A table for each held-out file, with the columns that any of its evaluations has."""
    return [_table(log, file, records) for file, records in log.by_file.items()]


def _table(log: RunHistory, file: str, records: list[EvaluationRecord]) -> EvaluationTable:
    names = dict.fromkeys(name for record in records for name in record.figures)
    ks = sorted(int(name.removeprefix("pass_at_")) for name in names if name.removeprefix("pass_at_").isdecimal())
    columns = {"sampled": ("sampled_mean", "sampled_stderr"), "greedy": ("greedy_mean", "greedy_stderr")}
    columns |= {f"pass@{k}": (f"pass_at_{k}", f"pass_at_{k}_stderr") for k in ks if k > 1}
    columns |= {name[5:-5]: (name, "") for name in names if name.startswith("part_") and name.endswith("_mean")}
    columns |= {"tokens": ("response_tokens_mean", ""), "cut off": ("truncated_share", "")}
    columns |= {"turns": ("turns_mean", ""), "tool calls": ("tool_calls_mean", "")}
    columns |= {"prompts": ("num_prompts", ""), "without a score": ("num_failed", "")}
    shown = {head: pair for head, pair in columns.items() if pair[0] in names}
    best = log.best[0] if log.best else None
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


def draw_reward(figure: Any, log: RunHistory) -> bool:
    """Held-out and training reward over the steps."""
    (panel,) = panels(figure, ["mean reward"])
    drawn = line(panel, log, "reward_mean", SKY, "training rollouts of the step")
    for (file, records), colour, marker in zip(log.by_file.items(), _COLOURS, _MARKERS, strict=False):
        name = file or "held-out prompts"
        drawn |= _points(panel, records, "sampled", colour, marker, f"{name}, sampled (± standard error)")
        if file == next(iter(log.by_file)):
            drawn |= _points(panel, records, "greedy", RED, "D", f"{name}, greedy")
    if log.best is not None:
        panel.axvline(log.best[0], color=RED, linestyle=":", linewidth=1, label=f"best version, {log.best[0]}")
    legend(panel)
    return drawn


def draw_pass(figure: Any, log: RunHistory) -> bool:
    """pass@k of the first held-out file over the versions."""
    (panel,) = panels(figure, ["share of prompts"])
    measured = [(record.version, record.figures) for record in log.headline]
    largest = max((largest_pass(figures) for _, figures in measured), default=0)
    drawn = False
    for k, colour, marker in zip(_shown_ks(largest), _COLOURS, _MARKERS, strict=False):
        found = [(version, figures[f"pass_at_{k}"]) for version, figures in measured if f"pass_at_{k}" in figures]
        if largest > 1 and len(found) > 1:
            panel.plot(*zip(*found, strict=True), color=colour, marker=marker, markersize=5, label=f"pass@{k}")
            drawn = True
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.set_xlabel("policy version")
    panel.set_ylim(0, 1.02)
    legend(panel)
    return drawn


def _shown_ks(largest: int) -> list[int]:
    """One answer, all answers, and the power of two in the middle."""
    middle = 1 << (largest.bit_length() // 2)
    return sorted({1, min(middle, largest), largest})


def _points(panel: Any, records: list[EvaluationRecord], name: str, colour: str, marker: str, label: str) -> bool:
    """A mean over the versions, with its standard error where the answers were sampled; False where there is none."""
    found = [(record.version, record.figures) for record in records if f"{name}_mean" in record.figures]
    if not found:
        return False
    errors = [figures.get(f"{name}_stderr", 0.0) if name == "sampled" else 0.0 for _, figures in found]
    panel.errorbar(
        [version for version, _ in found],
        [figures[f"{name}_mean"] for _, figures in found],
        yerr=errors if any(errors) else None,
        color=colour,
        marker=marker,
        markersize=5,
        capsize=3,
        linewidth=1.2,
        linestyle="-" if name == "sampled" else ":",
        label=label,
    )
    return True
