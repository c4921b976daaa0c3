"""The plots of a run whose rollouts are conversations: turns, tool calls, and how they ended.

A run of single answers has none of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.ticker import PercentFormatter

from gspo.cli.report.history import RunHistory
from gspo.cli.report.panels import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, legend, line, panels, stack

_HELD_OUT = (ORANGE, GREEN, PURPLE, RED)
# Outcome -> how it is said, its colour and hatch; what cuts a conversation off is hatched.
_ENDS = {
    "environment_done": ("the environment was done", GREEN, None),
    "turn_limit": ("max_turns", ORANGE, "///"),
    "turn_token_limit": ("turn_tokens", PURPLE, "///"),
    "truncated": ("response_length", SKY, "///"),
    "time_limit": ("total_timeout_s", GREY, "///"),
    "step_time_limit": ("step_timeout_s", BLUE, "xxx"),
    "environment_failed": ("the environment failed", RED, "xxx"),
}


def draw_turns(figure: Any, log: RunHistory) -> bool:
    """Turns of the policy in a conversation, in training and on held-out prompts."""
    if np.isnan(log.series("turns_mean")).all():
        return False
    (panel,) = panels(figure, ["turns"])
    line(panel, log, "turns_mean", BLUE, "mean over the step's rollouts")
    line(panel, log, "turns_done_mean", SKY, "of them, those that the environment ended")
    for (file, records), colour in zip(log.by_file.items(), _HELD_OUT, strict=False):
        points = [(r.version, r.figures["turns_mean"]) for r in records if "turns_mean" in r.figures]
        if points:
            label = f"{file or 'held-out prompts'}, sampled"
            panel.plot(*zip(*points, strict=True), "D", color=colour, markersize=5, label=label)
    panel.set_ylim(bottom=0)
    legend(panel)
    return True


def draw_tools(figure: Any, log: RunHistory) -> bool:
    """Tool calls, and turns with calls that could not be made."""
    calls, malformed = log.series("tool_calls_mean"), log.series("malformed_calls_mean")
    if not (np.nansum(calls) or np.nansum(malformed)):
        return False
    upper, lower = panels(figure, ["tool calls", "malformed"])
    line(upper, log, "tool_calls_mean", BLUE, "mean over the step's rollouts")
    line(lower, log, "malformed_calls_mean", RED, "turns with a call that cannot be made, mean over rollouts")
    upper.set_ylim(bottom=0)
    lower.set_ylim(0, max(0.05, lower.get_ylim()[1]))
    legend(upper, lower)
    return True


def draw_ends(figure: Any, log: RunHistory) -> bool:
    """Shares of the step's rollouts by what ended them."""
    if np.isnan(log.series("turns_mean")).all():
        return False
    found = {outcome: log.series(f"ended_{outcome}") for outcome in _ENDS}
    layers = [(_ENDS[o][0], values, *_ENDS[o][1:]) for o, values in found.items() if np.nansum(values)]
    (panel,) = panels(figure, ["share of rollouts"])
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    stack(panel, log.steps, layers)
    panel.set_ylim(0, 1)
    legend(panel)
    return bool(layers)
