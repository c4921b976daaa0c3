"""The plots of a run: each answers the question in its title, from the figures of the log alone.

PLOTS declares them; panels.py draws them. The functions here draw parts that are no figure of a step: evaluations and
groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gspo.common.config.schema import Config
from gspo.common.telemetry.advice import CLIPPED_TOO_MUCH
from gspo.common.telemetry.source_figures import named_sources, source_figure
from gspo.runlog.run_history import SETTLEMENTS, RunHistory
from gspo.runlog.run_log import EvaluationRecord
from gspo.view.picture.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    STYLE,
    Layer,
    Limit,
    Line,
    Panel,
    draw_line,
    draw_panels,
)

_SIZE_INCHES, _DPI = (6.4, 3.5), 150
# Of the held-out files, in their order.
_COLOURS, _STYLES = (BLUE, GREEN, PURPLE, ORANGE), ("o-", "s-", "^-", "v-")
# Of the sources of prompts, again from the first after the last.
_SOURCE_STYLES = tuple(product(("-", "--", ":"), (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)))
# The highest y of a share that is often 0.
_SMALL_SHARE = 0.05


class Plot:
    """One plot.

    Args:
        name: Of its file.
        question: Its title.
        reading: How to read it.
        panels: From top to bottom.
        needs: Figures of which one must have a value other than 0; empty where any value of a panel is enough.
    """

    def __init__(self, name: str, question: str, reading: str, *panels: Panel, needs: tuple[str, ...] = ()) -> None:
        self.name, self.question, self.reading, self.panels, self.needs = name, question, reading, panels, needs


def write_plots(history: RunHistory, folder: Path) -> list[Plot]:
    """Write the plots that the log has figures for as plots/*.png, and return them; files of the others are removed."""
    folder.mkdir(exist_ok=True)
    return [plot for plot in PLOTS if _write(plot, history, folder / f"{plot.name}.png")]


def _write(plot: Plot, history: RunHistory, path: Path) -> bool:
    with rc_context(STYLE):
        figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
        is_needed = not plot.needs or any(np.nansum(history.series(name)) for name in plot.needs)
        if not is_needed or not draw_panels(figure, plot.panels, history):
            path.unlink(missing_ok=True)
            return False
        figure.suptitle(plot.question, x=0.015, horizontalalignment="left", fontsize=11.5, fontweight="bold")
        figure.savefig(path)
    return True


def _add_points(
    axes: Any, records: list[EvaluationRecord], figure: str, label: str, colour: str, style: str, error: str = ""
) -> bool:
    """A figure of evaluations over the policy versions, with its standard error where `error` names one."""
    points = [record for record in records if figure in record.figures]
    if not points:
        return False
    errors = [record.figures.get(error, 0.0) for record in points]
    axes.errorbar(
        [record.version for record in points],
        [record.figures[figure] for record in points],
        yerr=errors if any(errors) else None,
        fmt=style,
        color=colour,
        markersize=5,
        capsize=3,
        linewidth=1.2,
        label=label,
    )
    return True


def _add_rewards(axes: Any, history: RunHistory) -> bool:
    """The held-out reward of every file, sampled, and of the first file also greedy."""
    has_content = False
    for (file, records), colour, style in zip(history.by_file.items(), _COLOURS, _STYLES, strict=False):
        name = file or "held-out prompts"
        label = f"{name}, sampled (± standard error)"
        has_content |= _add_points(axes, records, "sampled_mean", label, colour, style, "sampled_stderr")
        if records is history.headline:
            has_content |= _add_points(axes, records, "greedy_mean", f"{name}, greedy", RED, "D:")
    if history.best is not None:
        axes.axvline(history.best[0], color=RED, linestyle=":", linewidth=1, label=f"best version, {history.best[0]}")
    return has_content


def _add_pass_at_k(axes: Any, history: RunHistory) -> bool:
    """pass@k of the first held-out file over the versions: k of 1, a power of two in the middle, and the largest."""
    axes.set_xlabel("policy version")
    largest = max((record.largest_pass for record in history.headline), default=0)
    if largest < 2 or len(history.headline) < 2:
        return False
    ks = sorted({1, min(1 << (largest.bit_length() // 2), largest), largest})
    has_content = False
    for k, colour, style in zip(ks, _COLOURS, _STYLES, strict=False):
        has_content |= _add_points(axes, history.headline, f"pass_at_{k}", f"pass@{k}", colour, style)
    return has_content


def _add_turns(axes: Any, history: RunHistory) -> bool:
    """Turns of the conversations about held-out prompts; they alone are no reason to draw the plot."""
    for (file, records), colour in zip(history.by_file.items(), (ORANGE, GREEN, PURPLE, RED), strict=False):
        _add_points(axes, records, "turns_mean", f"{file or 'held-out prompts'}, sampled", colour, "D")
    return False


def _of_sources(figure: str) -> Callable[[Any, RunHistory], bool]:
    """Draws a figure of each source of prompts."""

    def add(axes: Any, history: RunHistory) -> bool:
        sources = named_sources(history.figures)
        for source, (style, colour) in zip(sources, cycle(_SOURCE_STYLES), strict=False):
            draw_line(axes, Line(source_figure(source, figure), source, colour, style), history)
        return bool(sources)

    return add


def _add_group_bars(axes: Any, history: RunHistory) -> bool:
    groups = history.groups
    counts = {**{name: groups.counts[name] for name in SETTLEMENTS}, "open": groups.open}
    if not groups.issued:
        return False
    bars = axes.barh(list(counts), list(counts.values()), color=(GREEN, SKY, ORANGE, RED, PURPLE, GREY))
    labels = [f"{count:,}  ({count / groups.issued:.0%})" for count in counts.values()]
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("groups")
    axes.margins(x=0.18)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(axis="y", visible=False)
    return True


def _clip_bounds(config: Config) -> Iterator[Limit]:
    """The log-ratios beyond which a sequence is clipped; a ratio of each token has no bound on their mean."""
    if not config.algorithm.clips_sequences or config.algorithm.pg_clip_reference_length is not None:
        return
    low, high = config.algorithm.clip
    if low < 1:
        yield Limit(float(np.log1p(-low)), "clip", RED)
    yield Limit(float(np.log1p(high)), None if low < 1 else "clip", RED)


def _add_clip_sides(axes: Any, history: RunHistory) -> bool:
    """The mean bounds of each step, if an answer's clip follows from its length."""
    low, high = (history.series(f"clip_{side}_mean") for side in ("low", "high"))
    if not np.isnan(high).all():
        style = {"color": RED, "linestyle": "--", "linewidth": 1}
        axes.plot(history.steps, np.log1p(-np.minimum(low, 1 - 1e-9)), label="clip, mean over sequences", **style)
        axes.plot(history.steps, np.log1p(high), **style)
    return False


def _age_limit(config: Config) -> Iterator[Limit]:
    staleness = config.staleness
    masks = staleness.on_stale == "mask"
    key, age = ("max_token_age", staleness.token_age_limit) if masks else ("max_lag", staleness.max_lag)
    yield Limit(age, f"allowed: staleness.{key} {age}")


PLOTS = (
    Plot(
        "reward",
        "Is the policy getting better?",
        "The held-out points can be compared: all are of the same prompts (the first ones, under "
        "evaluation.limit_between). The training line jumps, because each step has other prompts.",
        Panel(
            "mean reward",
            Line("reward_mean", "training rollouts of the step", SKY),
            add=_add_rewards,
            y_range=(None, None),
        ),
    ),
    Plot(
        "sources",
        "Which task gets better?",
        "The training rewards of each source of prompts. A source whose groups all have equal rewards teaches nothing "
        "at present, also with a large weight.",
        Panel("mean reward", add=_of_sources("reward_mean"), y_range=(None, None)),
        Panel("equal rewards", add=_of_sources("zero_spread_groups"), is_share=True, least_top=_SMALL_SHARE),
        Panel("tokens an answer", add=_of_sources("response_tokens_mean")),
    ),
    Plot(
        "pass",
        "Does it solve more, or the same more surely?",
        "pass@k: the chance that the best of k sampled answers has at least evaluation.pass_reward. If pass@1 rises "
        "and pass@k with a large k does not, the policy solves more surely the prompts that it could solve before.",
        Panel("share of prompts", add=_add_pass_at_k, is_share=True, y_range=(0, 1.02)),
    ),
    Plot(
        "turns",
        "How many turns does it take?",
        "A conversation that a limit ends is as long as the limit allows: see how conversations end.",
        Panel(
            "turns",
            Line("turns_mean", "mean over the step's rollouts", BLUE),
            Line("turns_done_mean", "of them, those that the environment ended", SKY),
            add=_add_turns,
        ),
        Panel("tokens a turn", Line("turn_tokens_mean", "mean over the step's turns", GREEN)),
    ),
    Plot(
        "tools",
        "Does it use its tools?",
        "Calls that the environment answered. A malformed call gets its error as answer, and counts among the turns.",
        Panel("tool calls", Line("tool_calls_mean", "mean over the step's rollouts", BLUE)),
        Panel(
            "malformed",
            Line("malformed_calls_mean", "turns with a malformed call, mean over rollouts", RED),
            least_top=_SMALL_SHARE,
        ),
        needs=("tool_calls_mean", "malformed_calls_mean"),
    ),
    Plot(
        "ends",
        "How do conversations end?",
        "Hatched: cut off by a limit of the section environment, or by a failure of the environment.",
        Panel(
            "share of rollouts",
            Layer("ended_environment_done", "the environment was done", GREEN),
            Layer("ended_turn_limit", "max_turns", ORANGE, "///"),
            Layer("ended_turn_token_limit", "turn_tokens", PURPLE, "///"),
            Layer("ended_truncated", "response_length", SKY, "///"),
            Layer("ended_time_limit", "total_timeout_s", GREY, "///"),
            Layer("ended_step_time_limit", "step_timeout_s", BLUE, "xxx"),
            Layer("ended_environment_failed", "the environment failed", RED, "xxx"),
            is_share=True,
            y_range=(0, 1),
        ),
    ),
    Plot(
        "spread",
        "Is there something to learn from?",
        "A group whose rewards are all equal gives no gradient, because advantages are relative to the group: its "
        "prompt is too hard or too easy.",
        Panel(
            "share of groups",
            Line("zero_spread_groups", "groups whose rewards are all equal", RED),
            is_share=True,
            least_top=_SMALL_SHARE,
        ),
        Panel("reward", Line("reward_std", "standard deviation over the step's rollouts", BLUE)),
    ),
    Plot(
        "clip",
        "How much of the signal does the clip remove?",
        "A clipped sequence gives no gradient in its optimizer step (under a token ratio, a part of it; under cispo "
        "its weight is bounded). If the line "
        "of the noise is far up in the bars, the clip cuts numerical differences between the engines, not changes of "
        "the policy.",
        Panel(
            "share of sequences",
            Line("noise_share", "outside by engine noise alone", "black", ":"),
            Layer("clipped_sequences_low", "ratio below the clip", BLUE),
            Layer("clipped_sequences_high", "ratio above it", ORANGE, "///"),
            limits=lambda _config: [Limit(CLIPPED_TOO_MUCH, f"advice when over {CLIPPED_TOO_MUCH:.0%} for long")],
            is_share=True,
        ),
    ),
    Plot(
        "clip_causes",
        "Why are sequences outside the clip?",
        "At the step's first weights, engine noise and lag put sequences outside. Above that line, the policy has "
        "moved within the step. Below the dotted line, the engines' noise alone explains it. With old_logprobs: "
        "recompute, movement is all there is.",
        Panel(
            "share of sequences",
            Line("outside_clip_sequences", "outside the clip", BLUE),
            Line("outside_clip_at_start", "of the step's first weights: noise and lag", ORANGE),
            Line("outside_clip_noise", "noise alone, where it is known", "black", ":"),
            is_share=True,
            least_top=_SMALL_SHARE,
        ),
    ),
    Plot(
        "log_ratio",
        "How far does the policy move from the old one?",
        "The mean log-ratio of a sequence's tokens, over all optimizer steps of a step. The old policy is the policy "
        "that sampled; with old_logprobs: recompute it has the step's first weights. Outside the dashed lines a "
        "sequence is clipped if its advantage points outwards.",
        Panel(
            "log-ratio (nats)",
            Line("log_ratio_mean", "mean over sequences", BLUE, band="log_ratio_std"),
            limits=_clip_bounds,
            add=_add_clip_sides,
            y_range=(None, None),
        ),
        Panel("largest |log-ratio|", Line("log_ratio_max", None, PURPLE)),
    ),
    Plot(
        "length",
        "Do answers grow, and are they cut off?",
        "If length and the share of cut-off answers rise together, response_length decides the reward.",
        Panel("tokens an answer", Line("response_tokens_mean", "mean over the step's rollouts", BLUE)),
        Panel(
            "cut off",
            Line("truncated_share", "share cut off at response_length", RED),
            is_share=True,
            least_top=_SMALL_SHARE,
        ),
    ),
    Plot(
        "experts",
        "How far do the routers move within a step?",
        "Under routing_replay: learner the step's passes keep the experts of its first weights. The line is the share "
        "of tokens whose router would have chosen others in the last mini-batch: what the replay holds back.",
        Panel(
            "share of tokens",
            Line("experts_changed", "tokens with other experts at present", PURPLE),
            is_share=True,
            least_top=_SMALL_SHARE,
        ),
    ),
    Plot(
        "age",
        "How old are the trained tokens?",
        "The number of versions between the policy that sampled a token and the trained policy. 0 is on-policy.",
        Panel(
            "age (policy versions)",
            Line("age_mean", "mean over counted tokens", BLUE),
            Line("age_max", "oldest counted token", RED, ":"),
            limits=_age_limit,
            y_range=(-0.05, None),
        ),
    ),
    Plot(
        "entropy",
        "Does the policy keep exploring?",
        "If the entropy falls towards 0, the rewards of a group become equal, and nothing is left to learn from.",
        Panel("entropy (nats)", Line("entropy", "mean over tokens", GREEN)),
        Panel("k3 (nats)", Line("k3", "KL estimate to the old policy", ORANGE)),
    ),
    Plot(
        "teacher",
        "Does the policy come to answer like its teacher?",
        "The KL from policy to teacher, estimated on the policy's own answers. It may stay above 0 where the policy "
        "has too few parameters for the teacher's answers.",
        Panel("KL (nats a token)", Line("teacher_kl", "mean over tokens", PURPLE), y_range=(None, None)),
    ),
    Plot(
        "gradient",
        "Is training stable?",
        "Look for jumps of the norm. The loss of a policy gradient does not fall during learning.",
        Panel(
            "gradient norm",
            Line("grad_norm", "before it is scaled down", BLUE),
            limits=lambda config: [
                Limit(config.learner.max_grad_norm, f"max_grad_norm {config.learner.max_grad_norm:g}")
            ],
        ),
        Panel("loss", Line("loss", None, PURPLE), y_range=(None, None)),
    ),
    Plot(
        "time",
        "Where does the time of a step go?",
        "Waiting means that generation or reward is slower than training. No waiting means that training is slower.",
        Panel(
            "seconds a step",
            Layer("wait_s", "waiting for rollouts", GREY),
            Layer("train_s", "training", BLUE),
            Layer("shift_s", "handing shared cards over", RED, "\\\\"),
            Layer("probe_s", "measuring the engines' mismatch", SKY),
            Layer("publish_s", "making the version: training waits", ORANGE, "///"),
            Layer("hold_s", "waiting for an evaluation", PURPLE, "xxx"),
            Layer("log_s", "logging", GREEN, "..."),
            Line("version_beside_s", "making the version, beside training", "black", ":"),
            Line("checkpoint_beside_s", "writing a checkpoint, beside training", "black", "--"),
        ),
    ),
    Plot(
        "mfu",
        "How well are the cards used?",
        "MFU: the operations that the model needs, as a share of the cards' peak. The learner's is over the time of "
        "training and its own cards; the loop's is over the whole step and the cards of learner and generators.",
        Panel("share of peak", Line("learner_mfu", "learner", BLUE), Line("mfu", "whole loop", ORANGE), is_share=True),
        Panel("tokens/s a card", Line("tokens_per_s_per_card", "trained tokens, whole loop", GREEN)),
    ),
    Plot(
        "groups",
        "How did the groups end?",
        "Every group that is issued ends once. Stale: too old to be trained. Unused: open at the end of the run.",
        Panel("", add=_add_group_bars, y_range=(None, None)),
    ),
)
