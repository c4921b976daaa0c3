"""The frame of every plot: panels side by side, one legend below, a question above."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

WIDTH, _DPI = 7.2, 150
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9CA3AF",
    "axes.labelcolor": "#374151",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E7EB",
    "xtick.color": "#4B5563",
    "ytick.color": "#4B5563",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@contextmanager
def panels(
    path: Path, question: str, *, rows: int = 1, columns: int = 1, height: float = 3.5, share_y: bool = True
) -> Iterator[Any]:
    """The panels of a plot, row by row; it is saved at the end of the block, with the longest legend of a panel."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), dpi=_DPI, layout="constrained")
        axes = figure.subplots(rows, columns, sharey=share_y, squeeze=False).ravel()
        yield axes
        handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda legend: len(legend[1]))
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        figure.suptitle(question, x=0.015, horizontalalignment="left", fontsize=11.5, fontweight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
