"""Text that the screens, `gspo status` and the report share: durations, steps, evaluations, the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from gspo.common.telemetry.advice import Verdict
from gspo.common.telemetry.step_time import seconds_by_function

_BAR_WIDTH = 24
# Of a step's line: label, figure, format.
_STEP_CELLS = (
    ("reward", "reward_mean", "{:.3f}"),
    ("clipped", "clipped_sequences", "{:.0%}"),
    ("age", "age_mean", "{:.2f}"),
    ("max", "age_max", "{:.0f}"),
    ("grad norm", "grad_norm", "{:.3g}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("", "step_s", "{:.1f} s"),
)


def duration(seconds: float) -> str:
    """'42 s', '3 min 5 s', '2 h 10 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def step_cells(figures: Mapping[str, float]) -> list[str]:
    """The figures of a step that fit on one line, each with its label."""
    return [f"{label} {form.format(figures[name])}".strip() for label, name, form in _STEP_CELLS if name in figures]


def evaluation_line(figures: Mapping[str, float]) -> str:
    """The main figures of an evaluation in one line."""
    means = [(name, figures[f"{name}_mean"]) for name in ("sampled", "greedy") if f"{name}_mean" in figures]
    if (largest := largest_pass(figures)) > 1:
        means.append((f"pass@{largest}", figures[f"pass_at_{largest}"]))
    return ", ".join(f"{name} {value:.3f}" for name, value in means)


def largest_pass(figures: Mapping[str, float]) -> int:
    """The largest k for which there is a pass@k; 0 without any."""
    suffixes = (name.removeprefix("pass_at_") for name in figures if name.startswith("pass_at_"))
    return max((int(k) for k in suffixes if k.isdecimal()), default=0)


def step_time_table(verdict: Verdict, steps: Sequence[Mapping[str, float]]) -> RenderableType:
    """The time of a step by cause, the longest first; the share of the reward names its functions.

    Args:
        steps: Figures of the newest steps, at least those of the verdict.
    """
    functions = seconds_by_function(*[dict(figures) for figures in steps[-verdict.steps :]])
    table = Table.grid(padding=(0, 2))
    for share in verdict.shares:
        bar = ProgressBar(1.0, share.share, _BAR_WIDTH)
        names = f" ({', '.join(functions)})" if share.cause == "reward" and functions else ""
        table.add_row(f"{share.share:4.0%}", f"{share.seconds:.2f} s", bar, share.in_words + names)
    return table


def verdict_lines(verdict: Verdict) -> list[str]:
    """The stage that bounds the run, the reason, and the changes to try, the most promising first."""
    return [f"bound by {verdict.stage}: {verdict.because}", *(f"  try {change}" for change in verdict.change)]


def step_time_title(verdict: Verdict) -> str:
    """The title of `step_time_table`."""
    mean = f", the mean of the last {verdict.steps} steps" if verdict.steps > 1 else ""
    return f"a step takes {verdict.seconds:.2f} s{mean}:"


def largest_shares(verdict: Verdict) -> str:
    """The three largest shares of a step's time, in one line."""
    return "  ".join(f"{share.share:.0%} {share.in_words}" for share in verdict.shares[:3])
