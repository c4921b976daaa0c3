"""The verdict on learning: rules over the figures of the last steps, each with its likely causes and what to try.

A rule needs its figures in every step that it looks at, and is silent without them. It changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from gspo.common.config.schema import Config

Steps = Sequence[Mapping[str, float]]
# Steps over which a trend is judged, from the mean of the first fifth to that of the last.
TREND_STEPS, TREND_PARTS = 20, 5
# Share of groups with equal rewards, and of answers cut off, above which most of a step teaches nothing.
MOST_EQUAL, MOST_CUT = 0.8, 0.5
# Factors between the first and the last steps of a trend.
_COLLAPSE, _GROWTH, _EXPLOSION = 0.1, 3.0, 50.0
# Least KL to the first policy, in nats a token, that is worth a sentence.
_LARGE_KL = 0.5
# The reward has fallen if its mean is lower by so many standard errors.
_STANDARD_ERRORS = 4.0


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        figures: Those that it reads.
        steps: Number of steps that it looks at.
        holds: Whether the finding is there.
        text: The sentence, of these steps.
    """

    name: str
    figures: tuple[str, ...]
    steps: int
    holds: Callable[[Steps], bool]
    text: Callable[[Steps, Config], str]


def learning_findings(figures: Steps, config: Config) -> dict[str, str]:
    """Sentences by the names of their rules for the newest step, given the steps up to it, oldest first."""
    return {
        rule.name: f"learning: {rule.text(figures[-rule.steps :], config)}"
        for rule in _rules(config)
        if len(steps := figures[-rule.steps :]) == rule.steps
        and all(name in step for step in steps for name in rule.figures)
        and rule.holds(steps)
    }


def has_signal(figures: Steps, config: Config) -> bool:
    """Whether the rewards of the last steps teach anything; without it speed is of no use."""
    return "no_signal" not in learning_findings(figures, config)


def _rules(config: Config) -> Iterator[Rule]:
    if config.algorithm.reward_norm in ("group", "leave_one_out") and not config.teacher.used:
        yield from _SIGNAL_RULES
    yield from _RULES


def _no_signal_text(steps: Steps, config: Config) -> str:
    newest = steps[-1]
    low, high = newest.get("reward_min", 0.0), newest.get("reward_max", 1.0)
    if newest.get("truncated_share", 0.0) > MOST_CUT:
        causes = (
            f"{newest['truncated_share']:.0%} of the answers are cut off at algorithm.response_length "
            f"{config.algorithm.response_length}. Raise it, or check that the policy knows its end token"
        )
    elif low == high:
        causes = (
            f"every answer gets {low:g}. Score answers of the log with `gspo reward try`: the function may look for "
            "another form, or at another column. Or the chat template lacks the place of the answer"
        )
    else:
        causes = "prompts are all too easy or too hard. Mix in others, or raise algorithm.num_return_sequences_in_group"
    return (
        f"in {len(steps)} steps the answers to each prompt had equal rewards, so no step has changed the policy by its "
        f"rewards; {causes}"
    )


def _weak_text(steps: Steps, config: Config) -> str:
    share = fmean(step["zero_spread_groups"] for step in steps)
    return (
        f"{share:.0%} of the groups have equal rewards, over {MOST_EQUAL:.0%} for {len(steps)} steps, and teach "
        f"nothing. Try algorithm.filter_zero_spread: true, data.curriculum: spread, or more than "
        f"{config.algorithm.num_return_sequences_in_group} answers to a prompt"
    )


def _cut_text(steps: Steps, config: Config) -> str:
    return (
        f"{steps[-1]['truncated_share']:.0%} of the answers are cut off at algorithm.response_length "
        f"{config.algorithm.response_length}, over {MOST_CUT:.0%} for {len(steps)} steps. Raise it; or the policy does "
        "not sample its end token: check the chat template and the tokenizer's eos_token"
    )


def _trend_text(name: str, sentence: str) -> Callable[[Steps, Config], str]:
    """The sentence of a trend, which has the figure's first and last values and the number of steps."""

    def text(steps: Steps, _config: Config) -> str:
        first, last = _ends(steps, name)
        return sentence.format(first=first, last=last, steps=len(steps))

    return text


def _gradient_text(steps: Steps, _config: Config) -> str:
    usual = median(step["grad_norm"] for step in steps[:-1])
    return (
        f"the gradient norm is {steps[-1]['grad_norm']:.3g}, and {usual:.3g} was usual in the {len(steps) - 1} steps "
        "before. Look at the newest rollouts; try a lower learner.learning_rate or learner.max_grad_norm"
    )


def ends(values: Sequence[float], parts: int) -> tuple[float, float]:
    """Means of the first and the last one of so many parts of the values."""
    size = max(1, len(values) // parts)
    return fmean(values[:size]), fmean(values[-size:])


def _ends(steps: Steps, name: str) -> tuple[float, float]:
    return ends([step[name] for step in steps], TREND_PARTS)


def _falls(steps: Steps) -> bool:
    """Whether the reward is lower at the end by more than its standard errors, with one reward counted a group."""
    first, last = _ends(steps, "reward_mean")
    variances = [step["reward_std"] ** 2 / max(1.0, step["groups"]) for step in steps]
    size = max(1, len(steps) // TREND_PARTS)
    return first - last > _STANDARD_ERRORS * math.sqrt(sum(ends(variances, TREND_PARTS)) / size)


def _runs_away(steps: Steps) -> bool:
    first, last = _ends(steps, "reference_kl")
    return last > _LARGE_KL and last > _GROWTH * first


def _collapses(steps: Steps) -> bool:
    first, last = _ends(steps, "entropy")
    return first > 0 and last < _COLLAPSE * first


def _explodes(steps: Steps) -> bool:
    usual = median(step["grad_norm"] for step in steps[:-1])
    return usual > 0 and steps[-1]["grad_norm"] > _EXPLOSION * usual


def _all_equal(steps: Steps) -> bool:
    return all(step["zero_spread_groups"] >= 1 for step in steps)


def _mostly_equal(steps: Steps) -> bool:
    return all(step["zero_spread_groups"] > MOST_EQUAL for step in steps) and not _all_equal(steps[-3:])


_SIGNAL_RULES = (
    Rule("no_signal", ("zero_spread_groups",), 3, _all_equal, _no_signal_text),
    Rule("weak_signal", ("zero_spread_groups",), 5, _mostly_equal, _weak_text),
)
_RULES = (
    Rule(
        "cut_off",
        ("truncated_share",),
        3,
        lambda steps: all(step["truncated_share"] > MOST_CUT for step in steps),
        _cut_text,
    ),
    Rule(
        "reward_falls",
        ("reward_mean", "reward_std", "groups"),
        TREND_STEPS,
        _falls,
        _trend_text(
            "reward_mean",
            "the reward fell from {first:.3g} to {last:.3g} within {steps} steps, by more than its errors. The "
            "learning rate may be too high (learner.learning_rate), or the clip too wide",
        ),
    ),
    Rule(
        "entropy_collapses",
        ("entropy",),
        TREND_STEPS,
        _collapses,
        _trend_text(
            "entropy",
            "the entropy fell from {first:.2g} to {last:.2g} nats a token within {steps} steps: answers to a prompt "
            "become one. Try a lower learner.learning_rate, algorithm.entropy_coef, or a narrower pg_clip_low",
        ),
    ),
    Rule(
        "kl_runs_away",
        ("reference_kl",),
        TREND_STEPS,
        _runs_away,
        _trend_text(
            "reference_kl",
            "the KL to the first policy rose from {first:.2g} to {last:.2g} nats a token within {steps} steps. Try a "
            "larger algorithm.kl_loss_coef, or a lower learner.learning_rate",
        ),
    ),
    Rule("gradient_explodes", ("grad_norm",), TREND_STEPS // 2, _explodes, _gradient_text),
)
