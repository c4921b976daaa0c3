"""What the plots are drawn of: panels over the steps, lines, stacked bars, limits, legends, in one style.

It knows no figure by name. Colours are Okabe and Ito's, told apart without colour vision. Neighbour: report_plots.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from gspo.cli.report.history import RunHistory

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#6B7280",
)
# From so many steps on a line is drawn thin, with its running mean over a twentieth of the steps.
_SMOOTH_FROM = 60
# Of a figure's width; the rest is the axis' labels.
_LEGEND_SHARE = 0.9
# The white rim keeps a point visible on bars.
_MARKED = {"markersize": 4, "markeredgecolor": "white", "markeredgewidth": 0.5, "linewidth": 1.5}
STYLE = {
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


def panels(figure: Any, labels: Sequence[str]) -> list[Any]:
    """One panel below the other for each y label, over the same steps."""
    made = list(figure.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0])
    for panel, label in zip(made, labels, strict=True):
        panel.set_ylabel(label)
        panel.margins(x=0.02)
    made[-1].set_xlabel("step")
    made[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    return made


def line(panel: Any, log: RunHistory, name: str, colour: str, label: str | None = None, style: str = "-") -> bool:
    """Draw a figure over the steps; False where no step has it."""
    values = log.series(name)
    if np.isnan(values).all():
        return False
    if len(values) < _SMOOTH_FROM:
        marker = "o" if len(values) <= 30 else None
        panel.plot(log.steps, values, style, color=colour, label=label, marker=marker, **_MARKED)
        return True
    width = len(values) // 20 | 1
    panel.plot(log.steps, values, style, color=colour, alpha=0.3, linewidth=0.8)
    smooth = f"{label or name.replace('_', ' ')}, mean of {width} steps"
    panel.plot(log.steps, running_mean(values, width), style, color=colour, label=smooth, linewidth=1.7)
    return True


def running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Of the up to `width` values around each; NaN counts for nothing."""
    window = np.ones(width)
    there = ~np.isnan(values)
    count = np.convolve(there, window, "same")
    total = np.convolve(np.where(there, values, 0.0), window, "same")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def limit(panel: Any, value: float, label: str) -> None:
    """A dashed line at a value that the configuration or the advice names."""
    panel.axhline(value, color=GREY, linestyle="--", linewidth=1, label=label)


def legend(*panels: Any) -> None:
    """Above each panel, where it hides nothing."""
    for panel in panels:
        for num_columns in range(len(panel.get_legend_handles_labels()[1]), 0, -1):
            made = panel.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=num_columns, borderaxespad=0.2)
            if made.get_window_extent().width < _LEGEND_SHARE * panel.figure.bbox.width:
                break


def stack(panel: Any, steps: NDArray[np.int64], layers: list[tuple[str, NDArray[np.float64], str, str | None]]) -> None:
    """Layers on each other, a bar a step; steps without figures are gaps."""
    edges = np.arange(steps[0], steps[-1] + 2) - 0.5
    base = np.zeros(len(edges) - 1)
    for label, values, colour, hatch in layers:
        layer = np.zeros_like(base)
        layer[steps - steps[0]] = np.nan_to_num(values)
        hatch_shown = hatch if len(base) <= 100 else None
        panel.stairs(
            base + layer,
            edges,
            baseline=base,
            fill=True,
            facecolor=colour,
            label=label,
            hatch=hatch_shown,
            edgecolor="white",
            linewidth=0,
        )
        base = base + layer
