"""The verdict on a run in words and tables: shares of a step's time, what bounds the run, what to change.

It draws no conclusions (services/common/bottleneck.py does). Neighbours: status.py, live.py.
"""

from __future__ import annotations

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from services.cli.view import View
from services.common.bottleneck import Verdict, verdict
from services.common.step_time import IN_WORDS, Share, seconds_by_function, shares

_BAR_WIDTH = 24


def verdict_of(view: View, num_generators: int) -> Verdict | None:
    """The verdict on the run that a view shows."""
    return verdict(list(view.steps), view.config, num_generators)


def last_step_table(view: View) -> RenderableType:
    """The last step's time by cause, the longest first, and the functions that rewards were waited for."""
    table = Table.grid(padding=(0, 2))
    for share in shares(view.figures):
        bar = ProgressBar(1.0, share.share, _BAR_WIDTH)
        table.add_row(f"{share.share:4.0%}", f"{share.seconds:.2f} s", bar, _words(share, view))
    return table


def _words(share: Share, view: View) -> str:
    functions = seconds_by_function(view.figures) if share.cause == "reward" else {}
    return IN_WORDS[share.cause] + (f" ({', '.join(functions)})" if functions else "")


def verdict_lines(found: Verdict) -> list[str]:
    """What bounds the run, why, and what to change, the most promising first."""
    return [
        f"bound by {found.stage}: {found.because} (mean of {found.steps} steps)",
        *(f"  try {change}" for change in found.change),
    ]


def in_one_line(found: Verdict) -> str:
    """The three largest shares."""
    return "  ".join(f"{share.share:.0%} {share.in_words}" for share in found.shares[:3])
