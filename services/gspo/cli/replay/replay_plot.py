"""The plot of a replay under other keys: each figure as recorded and as replayed, over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gspo.cli.replay.replay_plan import ReplayPlan
from gspo.cli.replay.replay_tables import shown_figures
from gspo.cli.replay.step_comparison import ComparedValue
from gspo.view.picture.panels import BLUE, GREY, RED, STYLE

_WIDTH_INCHES, _PANEL_INCHES, _DPI = 6.4, 1.9, 150


def write_plot(plan: ReplayPlan, values: Sequence[ComparedValue], path: Path) -> Path:
    """Write the plot as PNG; a panel for each figure, with the steps before the changed keys in grey."""
    names = [name for name in shown_figures(plan) if any(value.name == name for value in values)]
    with rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, 0.8 + _PANEL_INCHES * len(names)), dpi=_DPI, layout="constrained")
        figure.suptitle("\n".join(plan.changed.lines()), x=0.015, horizontalalignment="left", fontsize=9)
        panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(panels, names, strict=True):
            of_name = [value for value in values if value.name == name]
            steps = [value.step for value in of_name]
            axes.plot(steps, [_number(value.recorded) for value in of_name], "o-", color=BLUE, label="recorded")
            axes.plot(steps, [_number(value.replayed) for value in of_name], "s--", color=RED, label="replayed")
            axes.set_ylabel(name.replace("_", " "))
            if plan.has_lead:
                axes.axvspan(plan.start + 0.5, plan.first - 0.5, color=GREY, alpha=0.15, linewidth=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
        panels[-1].set_xlabel("step")
        figure.savefig(path)
    return path


def _number(value: float | str | None) -> float:
    return value if isinstance(value, float) else float("nan")
