"""Draws panels over the steps of a run from their declarations: lines, bands, stacked bars, limits, legends.

It knows no figure by name: plots.py declares which figures a panel shows. The colours are those of Okabe and Ito,
which people without colour vision can distinguish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from gspo.common.config.schema import Config
from gspo.runlog.run_history import RunHistory

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
_MARKERS_UP_TO = 30
_HATCHES_UP_TO = 100
# Of a figure's width; the rest is the axis' labels.
_LEGEND_SHARE = 0.9
# The white rim keeps a point visible on bars.
_LINE_STYLE = {"markersize": 4, "markeredgecolor": "white", "markeredgewidth": 0.5, "linewidth": 1.5}
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


@dataclass(frozen=True)
class Line:
    """A figure over the steps; `band` names the figure that is drawn as a width around it."""

    figure: str
    label: str | None
    colour: str
    style: str = "-"
    band: str = ""


@dataclass(frozen=True)
class Layer:
    """A figure as bars, on top of the layers before it; left out where it is 0 at every step."""

    figure: str
    label: str
    colour: str
    hatch: str | None = None


@dataclass(frozen=True)
class Limit:
    """A dashed line at a value that the configuration or the advice names."""

    value: float
    label: str | None
    colour: str = GREY


class Panel:
    """One panel of a plot.

    Args:
        label: Of the y axis.
        parts: The figures that it draws: first the layers as one stack, then the lines.
        limits: Makes the limits of a run's configuration.
        add: Draws into the axes after the lines; returns whether there was something to draw.
        is_share: Whether the y axis is in per cent.
        y_range: Lowest and highest y; None where the data decide.
        least_top: Lower bound of the highest y.
    """

    def __init__(
        self,
        label: str,
        *parts: Line | Layer,
        limits: Callable[[Config], Iterable[Limit]] | None = None,
        add: Callable[[Any, RunHistory], bool] | None = None,
        is_share: bool = False,
        y_range: tuple[float | None, float | None] = (0, None),
        least_top: float = 0.0,
    ) -> None:
        self.label, self.parts, self.limits, self.add = label, parts, limits, add
        self.is_share, self.y_range, self.least_top = is_share, y_range, least_top


def draw_panels(figure: Any, panels: Sequence[Panel], history: RunHistory) -> bool:
    """Draw panels below each other over the same steps; returns whether any of them had something to draw."""
    all_axes = make_axes(figure, [panel.label for panel in panels])
    has_content = [_draw_panel(axes, panel, history) for axes, panel in zip(all_axes, panels, strict=True)]
    return any(has_content)


def make_axes(figure: Any, labels: Sequence[str]) -> list[Any]:
    """Axes below each other for each y label, over the same steps."""
    all_axes = list(figure.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0])
    for axes, label in zip(all_axes, labels, strict=True):
        axes.set_ylabel(label)
        axes.margins(x=0.02)
    all_axes[-1].set_xlabel("step")
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    return all_axes


def _draw_panel(axes: Any, panel: Panel, history: RunHistory) -> bool:
    has_content = any(part.figure in figures for part in panel.parts for figures in history.figures)
    _draw_layers(axes, [part for part in panel.parts if isinstance(part, Layer)], history)
    for part in panel.parts:
        if isinstance(part, Line):
            draw_line(axes, part, history)
    if panel.add is not None:
        has_content |= panel.add(axes, history)
    if panel.limits is not None and history.config is not None:
        for limit in panel.limits(history.config):
            axes.axhline(limit.value, color=limit.colour, linestyle="--", linewidth=1, label=limit.label)
    if panel.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylim(*panel.y_range)
    if panel.least_top:
        axes.set_ylim(top=max(panel.least_top, axes.get_ylim()[1]))
    draw_legend(axes)
    return has_content


def draw_line(axes: Any, line: Line, history: RunHistory) -> None:
    """Draw a figure over the steps; nothing where no step has it."""
    values = history.series(line.figure)
    if np.isnan(values).all():
        return
    if line.band:
        width = history.series(line.band)
        axes.fill_between(
            history.steps, values - width, values + width, color=SKY, alpha=0.35, linewidth=0, label="± std"
        )
    if len(values) < _SMOOTH_FROM:
        # A value between steps without one has no line, only a marker.
        marker = "o" if (~np.isnan(values)).sum() <= _MARKERS_UP_TO else None
        axes.plot(history.steps, values, line.style, color=line.colour, label=line.label, marker=marker, **_LINE_STYLE)
        return
    num_steps = len(values) // 20 | 1
    axes.plot(history.steps, values, line.style, color=line.colour, alpha=0.3, linewidth=0.8)
    label = f"{line.label or line.figure.replace('_', ' ')}, mean of {num_steps} steps"
    axes.plot(history.steps, running_mean(values, num_steps), line.style, color=line.colour, label=label, linewidth=1.7)


def running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """The mean of the up to `width` values around each; NaN counts for nothing."""
    window = np.ones(width)
    is_number = ~np.isnan(values)
    count = np.convolve(is_number, window, "same")
    total = np.convolve(np.where(is_number, values, 0.0), window, "same")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _draw_layers(axes: Any, layers: Sequence[Layer], history: RunHistory) -> None:
    """Stack bars of one step's width; a step without figures is a gap."""
    steps = history.steps
    shown = [(layer, values) for layer in layers if np.nansum(values := history.series(layer.figure))]
    if not shown:
        return
    edges = np.arange(steps[0], steps[-1] + 2) - 0.5
    base = np.zeros(len(edges) - 1)
    for layer, values in shown:
        height = np.zeros_like(base)
        height[steps - steps[0]] = np.nan_to_num(values)
        axes.stairs(
            base + height,
            edges,
            baseline=base,
            fill=True,
            facecolor=layer.colour,
            label=layer.label,
            hatch=layer.hatch if len(base) <= _HATCHES_UP_TO else None,
            edgecolor="white",
            linewidth=0,
        )
        base = base + height


def draw_legend(axes: Any) -> None:
    """Put the legend above the panel, in as many columns as the plot is wide."""
    for num_columns in range(len(axes.get_legend_handles_labels()[1]), 0, -1):
        legend = axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=num_columns, borderaxespad=0.2)
        if legend.get_window_extent().width < _LEGEND_SHARE * axes.figure.bbox.width:
            break
