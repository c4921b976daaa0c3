"""Why sequences are outside the clip, in words and numbers for people: engines' noise, lag, movement.

The learner splits the share of each step (services/gspo/learner/objective/figures.py). Here are means over steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from gspo.common.config.schema import Config


@dataclass(frozen=True)
class ClipCauses:
    """Mean shares of sequences outside the clip. The parts add up to `outside` where both are known.

    A step's first update and its others are of other sequences, so a part may be below 0 by chance.

    Attributes:
        at_start: Outside at a step's first weights: noise and lag.
        movement: Outside by the policy's own movement within a step.
        noise, lag: None where the noise was not measured, and under old_logprobs: recompute.
        noise_clip: The side of the clip at which noise alone puts at most 1 % of the sequences outside; the newest.
        num_measured: Steps that know their noise.
        errors: Standard errors by part, from the scatter over the steps; empty for a single step.
    """

    outside: float
    at_start: float
    movement: float
    noise: float | None
    lag: float | None
    noise_clip: float | None
    num_measured: int = 0
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> str:
        """The cause with the largest part: noise, lag or movement; empty if only the sum of noise and lag is known."""
        parts = {"noise": self.noise, "lag": self.lag, "movement": self.movement}
        known = {name: part for name, part in parts.items() if part is not None}
        name = max(known, key=lambda cause: known[cause])
        return name if known[name] >= self.at_start or self.noise is not None else ""

    def in_words(self, part: str) -> str:
        """The share of a part in per cent, with its standard error where it has one."""
        error = self.errors.get(part)
        return f"{getattr(self, part):.1%}" + (f" \u00b1 {error:.1%}" if error is not None else "")


def clip_causes(figures: Sequence[Mapping[str, float]]) -> ClipCauses | None:
    """The causes over some steps; None where none of them has a split.

    The noise is the mean of the steps that know it.
    """
    steps = [step for step in figures if "outside_clip_at_start" in step]
    if not steps:
        return None
    outside, at_start = ([step[f"outside_clip_{part}"] for step in steps] for part in ("sequences", "at_start"))
    moved = [all_of_it - start for all_of_it, start in zip(outside, at_start, strict=True)]
    known = [step["outside_clip_noise"] for step in steps if "outside_clip_noise" in step]
    noise = fmean(known) if known else None
    clips = [step["noise_clip"] for step in steps if "noise_clip" in step]
    parts = {"outside": outside, "at_start": at_start, "movement": moved, "noise": known}
    errors = {name: stdev(values) / math.sqrt(len(values)) for name, values in parts.items() if len(values) > 1}
    if {"at_start", "noise"} <= errors.keys():
        errors["lag"] = math.hypot(errors["at_start"], errors["noise"])
    return ClipCauses(
        outside=fmean(outside),
        at_start=fmean(at_start),
        movement=fmean(moved),
        noise=noise,
        lag=None if noise is None else fmean(at_start) - noise,
        noise_clip=clips[-1] if clips else None,
        num_measured=len(known),
        errors=errors,
    )


def clip_causes_line(figures: Sequence[Mapping[str, float]], config: Config) -> str:
    """The causes over some steps in a sentence without its full stop; empty where none of them has a split."""
    causes = clip_causes(figures)
    if causes is None:
        return ""
    num = sum("outside_clip_at_start" in step for step in figures)
    mean = f", mean of {num} steps \u00b1 standard error" if num > 1 else ""
    movement = f"{causes.in_words('movement')} by the policy's movement within a step"
    if config.algorithm.old_logprobs == "recompute":
        parts = f"{movement}; with old_logprobs: recompute, neither noise nor lag is in the ratio"
    elif causes.noise is not None:
        seldom = f" (measured in {causes.num_measured} of {num} steps)" if causes.num_measured < num else ""
        noise = f"{causes.in_words('noise')} by the engines' noise{seldom}"
        parts = f"{noise}, {causes.in_words('lag')} by lag, {movement}"
    else:
        why = "learner.mismatch_every: 0" if not config.learner.mismatch_every else "the noise is not measured yet"
        parts = f"{causes.in_words('at_start')} by noise and lag together ({why}), {movement}"
    return f"Outside the clip: {causes.in_words('outside')} of sequences{mean}: {parts}"


_NOISE = "Numerical noise between generator and learner"


def mismatch_line(figures: Sequence[Mapping[str, float]], config: Config) -> str:
    """When the engines' mismatch was last measured, and the share of noise if that step is among the given ones."""
    age = figures[-1].get("mismatch_age") if figures else None
    if age is None:
        if config.learner.mismatch_every or not figures:
            return ""
        return (
            f"{_NOISE} is not measured (learner.mismatch_every: 0), so noise_share and the finding clip_is_noise are "
            "missing"
        )
    when = f"measured {age:.0f} step{'s' if age > 1 else ''} ago" if age else "measured in this step"
    measured = [step["noise_share"] for step in figures if "noise_share" in step]
    if not measured:
        return f"{_NOISE} was {when}"
    clips = [step["noise_clip"] for step in figures if "noise_clip" in step]
    narrowest = f"; 1% would be outside a clip of {clips[-1]:.2g} on both sides" if clips else ""
    return f"{_NOISE} puts {measured[-1]:.0%} outside the clip, {when}{narrowest}"
