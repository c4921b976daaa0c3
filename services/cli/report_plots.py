"""The plots of a run: each answers the question in its title, from the figures of the log alone.

No numbers are made here but a running mean over many steps, drawn beside what it smooths. Colours are Okabe and Ito's,
told apart without colour vision. Neighbours: report_log.py gives the figures, report_page.py shows the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from services.cli.report_log import SETTLEMENTS, RunLog, known
from services.common.advice import CLIPPED_TOO_MUCH

_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY, _GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#6B7280",
)
_SIZE_INCHES, _DPI = (6.4, 3.5), 150
# From so many steps on a line is drawn thin, with its running mean over a twentieth of the steps.
_SMOOTH_FROM = 60
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

Draw = Callable[[Any, RunLog], bool]


@dataclass(frozen=True)
class Plot:
    """One plot: its file, its question, how to read it, and what draws it (False where the log has nothing of it)."""

    name: str
    question: str
    reading: str
    draw: Draw


def write_plots(log: RunLog, folder: Path) -> list[Plot]:
    """Write plots/*.png; those that the log has figures for are returned, and what an earlier report left of the
    others is removed."""
    folder.mkdir(exist_ok=True)
    return [plot for plot in PLOTS if _write(plot, log, folder / f"{plot.name}.png")]


def _write(plot: Plot, log: RunLog, path: Path) -> bool:
    with rc_context(_STYLE):
        figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
        if not plot.draw(figure, log):
            path.unlink(missing_ok=True)
            return False
        figure.suptitle(plot.question, x=0.015, horizontalalignment="left", fontsize=11.5, fontweight="bold")
        figure.savefig(path)
    return True


def _panels(figure: Any, labels: Sequence[str]) -> list[Any]:
    """One panel below the other for each y label, over the same steps."""
    panels = list(figure.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0])
    for panel, label in zip(panels, labels, strict=True):
        panel.set_ylabel(label)
        panel.margins(x=0.02)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return panels


def _line(panel: Any, log: RunLog, name: str, colour: str, label: str | None = None, style: str = "-") -> bool:
    """Draw a figure over the steps; False where no step has it."""
    values = log.series(name)
    if np.isnan(values).all():
        return False
    if len(values) < _SMOOTH_FROM:
        marker = "o" if len(values) <= 30 else None
        panel.plot(log.steps, values, style, color=colour, label=label, marker=marker, markersize=3, linewidth=1.5)
        return True
    width = len(values) // 20 | 1
    panel.plot(log.steps, values, style, color=colour, alpha=0.3, linewidth=0.8)
    smooth = f"{label or name.replace('_', ' ')}, mean of {width} steps"
    panel.plot(log.steps, _running_mean(values, width), style, color=colour, label=smooth, linewidth=1.7)
    return True


def _running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Of the up to `width` values around each; NaN counts for nothing."""
    window = np.ones(width)
    there = ~np.isnan(values)
    count = np.convolve(there, window, "same")
    total = np.convolve(np.where(there, values, 0.0), window, "same")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _limit(panel: Any, value: float, label: str) -> None:
    panel.axhline(value, color=_GREY, linestyle="--", linewidth=1, label=label)


def _legend(*panels: Any) -> None:
    """Above each panel, where it hides nothing."""
    for panel in panels:
        if labels := panel.get_legend_handles_labels()[1]:
            columns = len(labels) if sum(map(len, labels)) < 75 else 2
            panel.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=columns, borderaxespad=0.2)


def _reward(figure: Any, log: RunLog) -> bool:
    (panel,) = _panels(figure, ["mean reward"])
    drawn = _line(panel, log, "reward_mean", _SKY, "training rollouts of the step")
    for name, colour, marker, label in (
        ("sampled", _BLUE, "o", "held-out prompts, sampled (± standard error)"),
        ("greedy", _RED, "D", "held-out prompts, greedy"),
    ):
        measured = [(record["version"], known(record["figures"])) for record in log.evaluations]
        found = [(version, figures) for version, figures in measured if f"{name}_mean" in figures]
        if not found:
            continue
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
        drawn = True
    _legend(panel)
    return drawn


def _clip(figure: Any, log: RunLog) -> bool:
    low, high = log.series("clipped_sequences_low"), log.series("clipped_sequences_high")
    if np.isnan(low).all():
        return False
    (panel,) = _panels(figure, ["share of sequences"])
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _stack(panel, log.steps, [("ratio below the clip", low, _BLUE, None), ("ratio above it", high, _ORANGE, "///")])
    _line(panel, log, "noise_share", "black", "outside by engine noise alone", ":")
    _limit(panel, CLIPPED_TOO_MUCH, f"too much for long: over {CLIPPED_TOO_MUCH:.0%}")
    panel.set_ylim(bottom=0)
    _legend(panel)
    return True


def _stack(
    panel: Any, steps: NDArray[np.int64], layers: list[tuple[str, NDArray[np.float64], str, str | None]]
) -> None:
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
            color=colour,
            label=label,
            hatch=hatch_shown,
            edgecolor="white",
            linewidth=0,
        )
        base = base + layer


def _log_ratio(figure: Any, log: RunLog) -> bool:
    mean, std = log.series("log_ratio_mean"), log.series("log_ratio_std")
    if np.isnan(mean).all():
        return False
    upper, lower = _panels(figure, ["log-ratio (nats)", "largest |log-ratio|"])
    upper.fill_between(log.steps, mean - std, mean + std, color=_SKY, alpha=0.35, linewidth=0, label="± std")
    _line(upper, log, "log_ratio_mean", _BLUE, "mean over sequences")
    if log.config is not None and log.config.algorithm.importance_sampling != "token":
        low, high = log.config.algorithm.clip
        bounds = (np.log1p(-low) if low < 1 else -np.inf, np.log1p(high))
        for bound, label in zip(bounds, ("clip", None), strict=True):
            if np.isfinite(bound):
                upper.axhline(bound, color=_RED, linestyle="--", linewidth=1, label=label)
    _line(lower, log, "log_ratio_max", _PURPLE)
    lower.set_ylim(bottom=0)
    _legend(upper)
    return True


def _length(figure: Any, log: RunLog) -> bool:
    upper, lower = _panels(figure, ["tokens an answer", "cut off"])
    drawn = _line(upper, log, "response_tokens_mean", _BLUE, "mean")
    _line(lower, log, "truncated_share", _RED, "share cut off at response_length")
    lower.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    upper.set_ylim(bottom=0)
    lower.set_ylim(0, max(0.05, lower.get_ylim()[1]))
    _legend(upper, lower)
    return drawn


def _spread(figure: Any, log: RunLog) -> bool:
    upper, lower = _panels(figure, ["share of groups", "reward"])
    drawn = _line(upper, log, "zero_spread_groups", _RED, "groups whose rewards are all equal")
    drawn |= _line(lower, log, "reward_std", _BLUE, "standard deviation over the step's rollouts")
    upper.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    upper.set_ylim(0, max(0.05, upper.get_ylim()[1]))
    lower.set_ylim(bottom=0)
    _legend(upper, lower)
    return drawn


def _age(figure: Any, log: RunLog) -> bool:
    (panel,) = _panels(figure, ["age (policy versions)"])
    drawn = _line(panel, log, "age_mean", _BLUE, "mean over counted tokens")
    drawn |= _line(panel, log, "age_max", _RED, "oldest counted token", ":")
    if log.config is not None:
        staleness = log.config.staleness
        masks = staleness.on_stale == "mask"
        limit, key = (staleness.token_age_limit, "max_token_age") if masks else (staleness.max_lag, "max_lag")
        _limit(panel, limit, f"allowed: staleness.{key} {limit}")
    panel.set_ylim(bottom=-0.05)
    _legend(panel)
    return drawn


def _entropy(figure: Any, log: RunLog) -> bool:
    upper, lower = _panels(figure, ["entropy (nats)", "k3 (nats)"])
    drawn = _line(upper, log, "entropy", _GREEN, "mean over tokens")
    drawn |= _line(lower, log, "k3", _ORANGE, "KL estimate to the old policy")
    upper.set_ylim(bottom=0)
    lower.set_ylim(bottom=0)
    _legend(upper, lower)
    return drawn


def _gradient(figure: Any, log: RunLog) -> bool:
    upper, lower = _panels(figure, ["gradient norm", "loss"])
    drawn = _line(upper, log, "grad_norm", _BLUE, "before it is scaled down")
    if log.config is not None:
        _limit(upper, log.config.learner.max_grad_norm, f"max_grad_norm {log.config.learner.max_grad_norm:g}")
    drawn |= _line(lower, log, "loss", _PURPLE)
    upper.set_ylim(bottom=0)
    _legend(upper, lower)
    return drawn


def _time(figure: Any, log: RunLog) -> bool:
    names = [
        ("wait_s", "waiting for rollouts", _GREY, None),
        ("train_s", "training", _BLUE, None),
        ("publish_s", "publishing", _ORANGE, "///"),
        ("log_s", "logging", _GREEN, "..."),
    ]
    layers = [(label, log.series(name), colour, hatch) for name, label, colour, hatch in names]
    if all(np.isnan(values).all() for _, values, _, _ in layers):
        return False
    (panel,) = _panels(figure, ["seconds a step"])
    _stack(panel, log.steps, layers)
    _legend(panel)
    return True


def _groups(figure: Any, log: RunLog) -> bool:
    counts = {**{name: log.groups.counts[name] for name in SETTLEMENTS}, "open": log.groups.open}
    if not log.groups.issued:
        return False
    panel = figure.subplots()
    colours = (_GREEN, _SKY, _ORANGE, _RED, _PURPLE, _GREY)
    bars = panel.barh(list(counts), list(counts.values()), color=colours)
    labels = [f"{count:,}  ({count / log.groups.issued:.0%})" for count in counts.values()]
    panel.bar_label(bars, labels, padding=4, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel("groups")
    panel.margins(x=0.18)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(axis="y", visible=False)
    return True


PLOTS = (
    Plot(
        "reward",
        "Is the policy getting better?",
        "Held-out points compare: they are of the same prompts (the first of them, under evaluation.limit_between). "
        "Training rollouts are of other prompts at every step, so their line jumps.",
        _reward,
    ),
    Plot(
        "spread",
        "Is there something to learn from?",
        "With an advantage relative to its group, a group whose rewards are all equal gives no gradient: prompts are "
        "too hard or too easy.",
        _spread,
    ),
    Plot(
        "clip",
        "How much of the signal does the clip throw away?",
        "A clipped sequence gives no gradient in its optimizer step (under a token ratio, a part of it). Where noise "
        "alone reaches far into the bars, the clip cuts numerical differences between the engines, not changes of the "
        "policy.",
        _clip,
    ),
    Plot(
        "log_ratio",
        "How far does the policy move from the old one?",
        "The mean log-ratio of a sequence's tokens, over all optimizer steps of a step. The old policy is the one that "
        "sampled, or under old_logprobs: recompute the step's first weights. Outside the dashed lines a sequence is "
        "clipped where its advantage points outwards.",
        _log_ratio,
    ),
    Plot(
        "length",
        "Do answers grow, and are they cut off?",
        "Growth with a rising share of cut-off answers means that response_length decides the reward.",
        _length,
    ),
    Plot(
        "age",
        "How old are the tokens that are trained on?",
        "Versions between the policy that sampled a token and the one that is trained. 0 is on-policy.",
        _age,
    ),
    Plot(
        "entropy",
        "Does the policy keep exploring?",
        "An entropy that falls towards 0 leaves groups without spread, and nothing to learn from.",
        _entropy,
    ),
    Plot(
        "gradient",
        "Is training stable?",
        "The loss of a policy gradient does not fall as learning goes on; jumps of the norm are what to look for.",
        _gradient,
    ),
    Plot(
        "time",
        "Where does the time of a step go?",
        "Waiting means that generation or reward is slower than training; without any waiting it is the other way.",
        _time,
    ),
    Plot(
        "groups",
        "How did the groups end?",
        "Every group that is issued ends once. Stale: too old when its turn came. Unused: open when the run ended.",
        _groups,
    ),
)
