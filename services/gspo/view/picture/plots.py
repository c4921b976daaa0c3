"""The plots of a run: each answers the question in its title, from the figures of the log alone.

A figure of a run is declared here, and nowhere else: the page and its export draw it, and a comparison of runs too. The
functions make lines that are no figure of a step, such as evaluations and limits.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import cycle, product

from gspo.common.telemetry.source_figures import named_sources, source_figure
from gspo.runlog.run_history import RunHistory
from gspo.runlog.run_log import EvaluationRecord
from gspo.runlog.sentences.held_out import error_of
from gspo.view.picture.curves import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    CaptionHint,
    Curve,
    Line,
    Panel,
    Plot,
    StepFigure,
    Style,
    captioned,
    level,
)

# Of the held-out files, in their order.
_COLOURS = (BLUE, GREEN, PURPLE, ORANGE)
# Of the sources of prompts, again from the first after the last.
_STYLES: tuple[Style, ...] = ("solid", "dashed", "dotted")
_SOURCE_STYLES = tuple(product(_STYLES, (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)))
# The highest y of a share or a mean that is often 0.
_SMALL_SHARE = 0.05
_share = partial(Panel, is_share=True, least_top=_SMALL_SHARE)


def curves_of(history: RunHistory) -> list[Curve]:
    """The curves that the log has figures for, in the order of PLOTS."""
    return captioned(curve for plot in PLOTS for curve in plot.curves(history))


def _evaluated(
    history: RunHistory, records: Iterable[EvaluationRecord], figure: str, label: str, colour: str
) -> Iterator[Line]:
    """A figure of evaluations over the policy versions, with its standard error where it has one."""
    having = [record for record in records if figure in record.figures]
    if having:
        values = {record.version: record.figures[figure] for record in having}
        errors = {record.version: error_of(record.figures, figure) for record in having}
        widths = errors if any(error is not None for error in errors.values()) else {}
        prompts = frozenset(history.held_out_prompts(record) for record in having)
        yield Line(label, figure, colour, values, "points", widths, having[0].file, prompts)


def _held_out_rewards(history: RunHistory) -> Iterator[Line]:
    """The held-out reward of every file, sampled, and of the first file also greedy; the best version."""
    for (file, records), colour in zip(history.by_file.items(), _COLOURS, strict=False):
        name = file or "held-out prompts"
        yield from _evaluated(history, records, "sampled_mean", f"{name}, sampled (± standard error)", colour)
        if records is history.headline:
            yield from _evaluated(history, records, "greedy_mean", f"{name}, greedy", RED)
    best = history.best[0] if history.best else None
    for record in history.headline:
        if record.version == best and "sampled_mean" in record.figures:
            label = f"best version, {best}"
            yield Line(label, "score", ORANGE, {record.version: record.figures["sampled_mean"]}, "points")


def _pass_at_k(history: RunHistory) -> Iterator[Line]:
    """pass@k of the first held-out file over the versions: k of 1, a power of two in the middle, and the largest."""
    largest = max((record.largest_pass for record in history.headline), default=0)
    if largest < 2 or len(history.headline) < 2:
        return
    ks = sorted({1, min(1 << (largest.bit_length() // 2), largest), largest})
    for k, colour in zip(ks, _COLOURS, strict=False):
        yield from _evaluated(history, history.headline, f"pass_at_{k}", f"pass@{k}", colour)


def _evaluated_turns(history: RunHistory) -> Iterator[Line]:
    """Turns of the conversations about held-out prompts."""
    for (file, records), colour in zip(history.by_file.items(), (ORANGE, GREEN, PURPLE, RED), strict=False):
        yield from _evaluated(history, records, "turns_mean", f"{file or 'held-out prompts'}, sampled", colour)


def _by_source(figure: str, history: RunHistory) -> Iterator[Line]:
    """A figure of each source of prompts."""
    for source, (style, colour) in zip(named_sources(history.figures), cycle(_SOURCE_STYLES), strict=False):
        yield from StepFigure(source_figure(source, figure), source, colour, style).lines(history)


def _clip_bounds(history: RunHistory) -> Iterator[Line]:
    """The log-ratios beyond which a sequence is clipped; a ratio of each token has no bound on their mean.

    If an answer's clip follows from its length, they are the means over the sequences of each step.
    """
    config = history.config
    if config is not None and config.algorithm.clips_sequences and config.algorithm.pg_clip_reference_length is None:
        low, high = config.algorithm.clip
        if low < 1:
            yield level(history, math.log1p(-low), "clip", RED)
        yield level(history, math.log1p(high), "clip", RED)
    for figure, sign in (("clip_low_mean", -1), ("clip_high_mean", 1)):
        means = {step: value for step, value in history.series(figure).items() if value is not None}
        if means:
            bounds = {step: math.log1p(max(sign * value, 1e-9 - 1)) for step, value in means.items()}
            yield Line("clip, mean over sequences", figure, RED, bounds, "dashed")


def _age_limit(history: RunHistory) -> Iterator[Line]:
    if history.config is not None:
        staleness = history.config.staleness
        masks = staleness.on_stale == "mask"
        key, age = ("max_token_age", staleness.token_age_limit) if masks else ("max_lag", staleness.max_lag)
        yield level(history, age, f"allowed: staleness.{key} {age}")


def _gradient_limit(history: RunHistory) -> Iterator[Line]:
    if history.config is not None:
        limit = history.config.learner.max_grad_norm
        yield level(history, limit, f"max_grad_norm {limit:g}")


def _clipped_limit(history: RunHistory) -> Iterator[Line]:
    if history.config is not None:
        bound = history.config.rules.bounds.clipped_too_much
        yield level(history, bound, f"advice when over {bound:.0%} for long")


PLOTS = (
    Plot(
        "reward",
        "Is the policy getting better?",
        (
            CaptionHint("The training line jumps, because each step has other prompts.", ("reward_mean",)),
            CaptionHint(
                "Bands are standard errors over held-out prompts; a difference within two of them is none.",
                ("sampled_mean",),
            ),
        ),
        Panel(
            "mean reward",
            StepFigure("reward_mean", "training rollouts of the step", SKY),
            lines=_held_out_rewards,
            low=None,
        ),
    ),
    Plot(
        "length",
        "Do answers grow, and are they cut off?",
        (
            CaptionHint(
                "If length and the share of cut-off answers rise together, response_length decides the reward.",
                ("response_tokens_mean", "truncated_share"),
            ),
        ),
        Panel("tokens an answer", StepFigure("response_tokens_mean", "mean over the step's rollouts", BLUE)),
        _share("cut off", StepFigure("truncated_share", "share cut off at response_length", RED)),
    ),
    Plot(
        "clip",
        "How much of the signal does the clip remove?",
        (
            CaptionHint(
                "A clipped sequence gives no gradient in its optimizer step (under a token ratio, a part of it; under "
                "cispo its weight is bounded)."
            ),
            CaptionHint(
                "If the line of the noise is far up in the bars, the clip cuts numerical differences between the "
                "engines, not changes of the policy.",
                ("noise_share",),
            ),
        ),
        Panel(
            "share of sequences",
            StepFigure("clipped_sequences_low", "ratio below the clip", BLUE, "stacked"),
            StepFigure("clipped_sequences_high", "ratio above it", ORANGE, "stacked"),
            StepFigure("noise_share", "outside by engine noise alone", "black", "dotted"),
            beside=_clipped_limit,
            is_share=True,
        ),
    ),
    Plot(
        "clip_causes",
        "Why are sequences outside the clip?",
        (
            CaptionHint(
                "At the step's first weights, engine noise and lag put sequences outside.",
                ("outside_clip_at_start",),
            ),
            CaptionHint(
                "In one of learner.clip_split_every steps, the same sequences are looked at after the last update: the "
                "point above the line is the policy's own movement.",
                ("outside_clip_at_end",),
            ),
            CaptionHint("Below the dotted line, the engines' noise alone explains it.", ("outside_clip_noise",)),
            CaptionHint("With old_logprobs: recompute, movement is all there is."),
        ),
        _share(
            "share of sequences",
            StepFigure("outside_clip_sequences", "outside as each was trained", BLUE),
            StepFigure("outside_clip_at_end", "after the last update", RED, "points"),
            StepFigure("outside_clip_at_start", "of the step's first weights: noise and lag", ORANGE),
            StepFigure("outside_clip_noise", "noise alone, where it is known", "black", "dotted"),
        ),
    ),
    Plot(
        "log_ratio",
        "How far does the policy move from the old one?",
        (
            CaptionHint(
                "The mean log-ratio of a sequence's tokens, over all optimizer steps of a step, and its standard "
                "deviation. The old policy is the policy that sampled; with old_logprobs: recompute it has the step's "
                "first weights.",
            ),
            *(
                CaptionHint("Outside the dashed lines a sequence is clipped if its advantage points outwards.", (clip,))
                for clip in ("clip", "clip_low_mean")
            ),
        ),
        Panel(
            "log-ratio (nats)",
            StepFigure("log_ratio_mean", "mean over sequences (± std)", BLUE, width="log_ratio_std"),
            beside=_clip_bounds,
            low=None,
        ),
        Panel("largest |log-ratio|", StepFigure("log_ratio_max", "largest", PURPLE)),
    ),
    Plot(
        "entropy",
        "Does the policy keep exploring?",
        "If the entropy falls towards 0, the rewards of a group become equal, and nothing is left to learn from.",
        Panel("entropy (nats)", StepFigure("entropy", "mean over tokens", GREEN)),
        Panel("k3 (nats)", StepFigure("k3", "KL estimate to the old policy", ORANGE)),
    ),
    Plot(
        "gradient",
        "Is training stable?",
        "Look for jumps of the norm. The loss of a policy gradient does not fall during learning.",
        Panel("gradient norm", StepFigure("grad_norm", "before it is scaled down", BLUE), beside=_gradient_limit),
        Panel("loss", StepFigure("loss", "loss", PURPLE), low=None),
    ),
    Plot(
        "spread",
        "Is there something to learn from?",
        "A group whose rewards are all equal gives no gradient, because advantages are relative to the group: its "
        "prompt is too hard or too easy.",
        _share("share of groups", StepFigure("zero_spread_groups", "groups whose rewards are all equal", RED)),
        Panel("reward", StepFigure("reward_std", "standard deviation over the step's rollouts", BLUE)),
    ),
    Plot(
        "age",
        "How old are the trained tokens?",
        "The number of versions between the policy that sampled a token and the trained policy. 0 is on-policy.",
        Panel(
            "age (policy versions)",
            StepFigure("age_mean", "mean over counted tokens", BLUE),
            StepFigure("age_max", "oldest counted token", RED, "dotted"),
            beside=_age_limit,
            low=-0.05,
        ),
    ),
    Plot(
        "time",
        "Where does the time of a step go?",
        "Waiting means that generation or reward is slower than training. No waiting means that training is slower.",
        Panel(
            "seconds a step",
            StepFigure("wait_s", "waiting for rollouts", GREY, "stacked"),
            StepFigure("train_s", "training", BLUE, "stacked"),
            StepFigure("shift_s", "handing shared GPUs over", RED, "stacked"),
            StepFigure("probe_s", "measuring the engines' mismatch", SKY, "stacked"),
            StepFigure("clip_split_s", "looking for the causes of the clip", "black", "stacked"),
            StepFigure("publish_s", "making the version: training waits", ORANGE, "stacked"),
            StepFigure("hold_s", "waiting for an evaluation", PURPLE, "stacked"),
            StepFigure("log_s", "logging", GREEN, "stacked"),
            StepFigure("version_beside_s", "making the version, beside training", "black", "dotted"),
            StepFigure("checkpoint_beside_s", "writing a checkpoint, beside training", "black", "dashed"),
        ),
    ),
    Plot(
        "sources",
        "Which task gets better?",
        "The training rewards of each source of prompts. A source whose groups all have equal rewards teaches nothing "
        "at present, also with a large weight.",
        Panel("mean reward", lines=partial(_by_source, "reward_mean"), low=None),
        _share("equal rewards", lines=partial(_by_source, "zero_spread_groups")),
        Panel("tokens an answer", lines=partial(_by_source, "response_tokens_mean")),
    ),
    Plot(
        "pass",
        "Does it solve more, or the same more surely?",
        "pass@k: the chance that the best of k sampled answers has at least evaluation.pass_reward. If pass@1 rises "
        "and pass@k with a large k does not, the policy solves more surely the prompts that it could solve before.",
        Panel("share of prompts", lines=_pass_at_k, is_share=True, high=1.02),
    ),
    Plot(
        "turns",
        "How many turns does it take?",
        "A conversation that a limit ends is as long as the limit allows: see how conversations end.",
        Panel(
            "turns",
            StepFigure("turns_mean", "mean over the step's rollouts", BLUE),
            StepFigure("turns_done_mean", "of them, those that the environment ended", SKY),
            beside=_evaluated_turns,
        ),
        Panel("tokens a turn", StepFigure("turn_tokens_mean", "mean over the step's turns", GREEN)),
    ),
    Plot(
        "tools",
        "Does it use its tools?",
        "Calls that the environment answered. A malformed call gets its error as answer, and counts among the turns.",
        Panel("tool calls", StepFigure("tool_calls_mean", "mean over the step's rollouts", BLUE)),
        Panel(
            "malformed",
            StepFigure("malformed_calls_mean", "turns with a malformed call, mean over rollouts", RED),
            least_top=_SMALL_SHARE,
        ),
        needs=("tool_calls_mean", "malformed_calls_mean"),
    ),
    Plot(
        "ends",
        "How do conversations end?",
        "All but the first layer were cut off by a limit of the section environment, or by a failure of the "
        "environment.",
        Panel(
            "share of rollouts",
            StepFigure("ended_environment_done", "the environment was done", GREEN, "stacked"),
            StepFigure("ended_turn_limit", "max_turns", ORANGE, "stacked"),
            StepFigure("ended_turn_token_limit", "turn_tokens", PURPLE, "stacked"),
            StepFigure("ended_truncated", "response_length", SKY, "stacked"),
            StepFigure("ended_time_limit", "total_timeout_s", GREY, "stacked"),
            StepFigure("ended_step_time_limit", "step_timeout_s", BLUE, "stacked"),
            StepFigure("ended_environment_failed", "the environment failed", RED, "stacked"),
            is_share=True,
            high=1.0,
        ),
    ),
    Plot(
        "experts",
        "How far do the routers move within a step?",
        "Under routing_replay: learner the step's passes keep the experts of its first weights. The line is the share "
        "of tokens whose router would have chosen others in the last mini-batch: what the replay holds back.",
        _share("share of tokens", StepFigure("experts_changed", "tokens with other experts at present", PURPLE)),
    ),
    Plot(
        "teacher",
        "Does the policy come to answer like its teacher?",
        "The KL from policy to teacher, estimated on the policy's own answers. It may stay above 0 where the policy "
        "has too few parameters for the teacher's answers.",
        Panel("KL (nats a token)", StepFigure("teacher_kl", "mean over tokens", PURPLE), low=None),
    ),
    Plot(
        "mfu",
        "How well are the GPUs used?",
        "MFU: the operations that the model needs, as a share of the GPUs' peak. The learner's is over the time of "
        "training and its own GPUs; the loop's is over the whole step and the GPUs of learner and generators.",
        Panel(
            "share of peak",
            StepFigure("learner_mfu", "learner", BLUE),
            StepFigure("mfu", "whole loop", ORANGE),
            is_share=True,
        ),
        Panel("tokens/s a GPU", StepFigure("tokens_per_s_per_gpu", "trained tokens, whole loop", GREEN)),
    ),
)
