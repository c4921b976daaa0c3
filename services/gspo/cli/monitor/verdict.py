"""The verdict on a run in words and tables: shares of a step's time, what bounds the run, what to change.

It draws no conclusions (services/gspo/common/telemetry/bottleneck.py does).
"""

from __future__ import annotations

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from gspo.cli.monitor.view import View
from gspo.common.telemetry.bottleneck import Verdict, verdict
from gspo.common.telemetry.step_time import seconds_by_function

_BAR_WIDTH = 24


def verdict_of(view: View, num_generators: int) -> Verdict | None:
    """The verdict on the run that a view shows."""
    return verdict(list(view.steps), view.config, num_generators)


def step_time_table(found: Verdict, view: View) -> RenderableType:
    """The time of a step by cause, the longest first, over the steps of the verdict; and the functions waited for."""
    functions = seconds_by_function(*list(view.steps)[-found.steps :])
    table = Table.grid(padding=(0, 2))
    for share in found.shares:
        bar = ProgressBar(1.0, share.share, _BAR_WIDTH)
        named = f" ({', '.join(functions)})" if share.cause == "reward" and functions else ""
        table.add_row(f"{share.share:4.0%}", f"{share.seconds:.2f} s", bar, share.in_words + named)
    return table


def verdict_lines(found: Verdict) -> list[str]:
    """What bounds the run, why, and what to change, the most promising first."""
    return [f"bound by {found.stage}: {found.because}", *(f"  try {change}" for change in found.change)]


def over_steps(found: Verdict) -> str:
    """What the table and the verdict are of."""
    mean = f", the mean of the last {found.steps} steps" if found.steps > 1 else ""
    return f"a step takes {found.seconds:.2f} s{mean}:"


def in_one_line(found: Verdict) -> str:
    """The three largest shares."""
    return "  ".join(f"{share.share:.0%} {share.in_words}" for share in found.shares[:3])
