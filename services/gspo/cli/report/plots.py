"""The plots of a run: each answers the question in its title, from the figures of the log alone.

No numbers are made here but a running mean over many steps, drawn beside what it smooths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from gspo.cli.report.conversations import draw_ends, draw_tools, draw_turns
from gspo.cli.report.evaluations import draw_pass, draw_reward
from gspo.cli.report.history import SETTLEMENTS, RunHistory
from gspo.cli.report.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    STYLE,
    legend,
    limit,
    line,
    panels,
    stack,
)
from gspo.common.telemetry.advice import CLIPPED_TOO_MUCH

_SIZE_INCHES, _DPI = (6.4, 3.5), 150

Draw = Callable[[Any, RunHistory], bool]


@dataclass(frozen=True)
class Plot:
    """One plot: its file, its question, how to read it, and what draws it (False where the log has nothing of it)."""

    name: str
    question: str
    reading: str
    draw: Draw


def write_plots(log: RunHistory, folder: Path) -> list[Plot]:
    """Write plots/*.png; those that the log has figures for are returned, and what an earlier report left of the
    others is removed."""
    folder.mkdir(exist_ok=True)
    return [plot for plot in PLOTS if _write(plot, log, folder / f"{plot.name}.png")]


def _write(plot: Plot, log: RunHistory, path: Path) -> bool:
    with rc_context(STYLE):
        figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
        if not plot.draw(figure, log):
            path.unlink(missing_ok=True)
            return False
        figure.suptitle(plot.question, x=0.015, horizontalalignment="left", fontsize=11.5, fontweight="bold")
        figure.savefig(path)
    return True


def _clip(figure: Any, log: RunHistory) -> bool:
    low, high = log.series("clipped_sequences_low"), log.series("clipped_sequences_high")
    if np.isnan(low).all():
        return False
    (panel,) = panels(figure, ["share of sequences"])
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    stack(panel, log.steps, [("ratio below the clip", low, BLUE, None), ("ratio above it", high, ORANGE, "///")])
    line(panel, log, "noise_share", "black", "outside by engine noise alone", ":")
    limit(panel, CLIPPED_TOO_MUCH, f"advice when over {CLIPPED_TOO_MUCH:.0%} for long")
    panel.set_ylim(bottom=0)
    legend(panel)
    return True


def _log_ratio(figure: Any, log: RunHistory) -> bool:
    mean, std = log.series("log_ratio_mean"), log.series("log_ratio_std")
    if np.isnan(mean).all():
        return False
    upper, lower = panels(figure, ["log-ratio (nats)", "largest |log-ratio|"])
    upper.fill_between(log.steps, mean - std, mean + std, color=SKY, alpha=0.35, linewidth=0, label="± std")
    line(upper, log, "log_ratio_mean", BLUE, "mean over sequences")
    if log.config is not None and log.config.algorithm.importance_sampling != "token":
        low, high = log.config.algorithm.clip
        bounds = (np.log1p(-low) if low < 1 else -np.inf, np.log1p(high))
        for bound, label in zip(bounds, ("clip", None), strict=True):
            if np.isfinite(bound):
                upper.axhline(bound, color=RED, linestyle="--", linewidth=1, label=label)
    line(lower, log, "log_ratio_max", PURPLE)
    lower.set_ylim(bottom=0)
    legend(upper)
    return True


def _length(figure: Any, log: RunHistory) -> bool:
    upper, lower = panels(figure, ["tokens an answer", "cut off"])
    drawn = line(upper, log, "response_tokens_mean", BLUE, "mean over the step's rollouts")
    line(lower, log, "truncated_share", RED, "share cut off at response_length")
    lower.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    upper.set_ylim(bottom=0)
    lower.set_ylim(0, max(0.05, lower.get_ylim()[1]))
    legend(upper, lower)
    return drawn


def _spread(figure: Any, log: RunHistory) -> bool:
    upper, lower = panels(figure, ["share of groups", "reward"])
    drawn = line(upper, log, "zero_spread_groups", RED, "groups whose rewards are all equal")
    drawn |= line(lower, log, "reward_std", BLUE, "standard deviation over the step's rollouts")
    upper.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    upper.set_ylim(0, max(0.05, upper.get_ylim()[1]))
    lower.set_ylim(bottom=0)
    legend(upper, lower)
    return drawn


def _age(figure: Any, log: RunHistory) -> bool:
    (panel,) = panels(figure, ["age (policy versions)"])
    drawn = line(panel, log, "age_mean", BLUE, "mean over counted tokens")
    drawn |= line(panel, log, "age_max", RED, "oldest counted token", ":")
    if log.config is not None:
        staleness = log.config.staleness
        masks = staleness.on_stale == "mask"
        key, age = ("max_token_age", staleness.token_age_limit) if masks else ("max_lag", staleness.max_lag)
        limit(panel, age, f"allowed: staleness.{key} {age}")
    panel.set_ylim(bottom=-0.05)
    legend(panel)
    return drawn


def _entropy(figure: Any, log: RunHistory) -> bool:
    upper, lower = panels(figure, ["entropy (nats)", "k3 (nats)"])
    drawn = line(upper, log, "entropy", GREEN, "mean over tokens")
    drawn |= line(lower, log, "k3", ORANGE, "KL estimate to the old policy")
    upper.set_ylim(bottom=0)
    lower.set_ylim(bottom=0)
    legend(upper, lower)
    return drawn


def _gradient(figure: Any, log: RunHistory) -> bool:
    upper, lower = panels(figure, ["gradient norm", "loss"])
    drawn = line(upper, log, "grad_norm", BLUE, "before it is scaled down")
    if log.config is not None:
        limit(upper, log.config.learner.max_grad_norm, f"max_grad_norm {log.config.learner.max_grad_norm:g}")
    drawn |= line(lower, log, "loss", PURPLE)
    upper.set_ylim(bottom=0)
    legend(upper, lower)
    return drawn


def _time(figure: Any, log: RunHistory) -> bool:
    names = [
        ("wait_s", "waiting for rollouts", GREY, None),
        ("train_s", "training", BLUE, None),
        ("publish_s", "publishing", ORANGE, "///"),
        ("hold_s", "held for an evaluation", PURPLE, "xxx"),
        ("log_s", "logging", GREEN, "..."),
    ]
    layers = [(label, log.series(name), colour, hatch) for name, label, colour, hatch in names]
    if all(np.isnan(values).all() for _, values, _, _ in layers):
        return False
    (panel,) = panels(figure, ["seconds a step"])
    stack(panel, log.steps, layers)
    legend(panel)
    return True


def _groups(figure: Any, log: RunHistory) -> bool:
    counts = {**{name: log.groups.counts[name] for name in SETTLEMENTS}, "open": log.groups.open}
    if not log.groups.issued:
        return False
    panel = figure.subplots()
    colours = (GREEN, SKY, ORANGE, RED, PURPLE, GREY)
    bars = panel.barh(list(counts), list(counts.values()), color=colours)
    labels = [f"{count:,}  ({count / log.groups.issued:.0%})" for count in counts.values()]
    panel.bar_label(bars, labels, padding=4, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel("groups")
    panel.margins(x=0.18)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    panel.grid(axis="y", visible=False)
    return True


PLOTS = (
    Plot(
        "reward",
        "Is the policy getting better?",
        "Held-out points compare: they are of the same prompts (the first of them, under evaluation.limit_between). "
        "Training rollouts are of other prompts at every step, so their line jumps.",
        draw_reward,
    ),
    Plot(
        "pass",
        "Does it solve more, or the same more surely?",
        "pass@k: the chance that the best of k sampled answers has at least evaluation.pass_reward. Where pass@1 rises "
        "and pass@k with a large k does not, the policy finds more surely what it could find before.",
        draw_pass,
    ),
    Plot(
        "turns",
        "How many turns does it take?",
        "Of conversations that a limit ends the length says what the limit allows: see how they end.",
        draw_turns,
    ),
    Plot(
        "tools",
        "Does it use its tools?",
        "Calls that the environment answered. A malformed call is answered with what is wrong with it, and costs a "
        "turn.",
        draw_tools,
    ),
    Plot(
        "ends",
        "How do conversations end?",
        "Hatched: cut off by a limit of the section environment, or by the environment's failure.",
        draw_ends,
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
