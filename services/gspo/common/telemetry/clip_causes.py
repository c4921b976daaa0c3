"""Why sequences are outside the clip, in words and numbers for people: engines' noise, lag, movement.

The learner splits the share of each step (services/gspo/learner/objective/figures.py). Here are means over steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from gspo.common.config.schema import Config


@dataclass(frozen=True)
class ClipCauses:
    """Mean shares of sequences outside the clip. Known parts add up to `at_end`, or else to `at_start`.

    Attributes:
        trained: Outside as each was trained.
        at_start: Outside at a step's first weights: noise and lag.
        at_end: The same sequences after the step's last update; None where no step looked at them.
        movement: Outside by the policy's own movement within a step, at_end less at_start.
        noise, lag: None where the noise was not measured, and under old_logprobs: recompute.
        noise_clip: The side of the clip at which noise alone puts at most 1 % of the sequences outside; the newest.
        num_steps: Steps of `at_start`: those that know `at_end`, or all if none does.
        num_measured: Steps that know their noise.
        errors: Standard errors by part, from the scatter over the steps; empty for a single step.
    """

    trained: float
    at_start: float
    at_end: float | None
    movement: float | None
    noise: float | None
    lag: float | None
    noise_clip: float | None
    num_steps: int = 0
    num_measured: int = 0
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> str:
        """The cause with the largest part: noise, lag or movement.

        Empty if a part is unknown, unless another is half of all that is outside.
        """
        parts = {"noise": self.noise, "lag": self.lag, "movement": self.movement}
        known = {name: part for name, part in parts.items() if part is not None}
        if not known:
            return ""
        name = max(known, key=lambda cause: known[cause])
        whole = self.trained if self.at_end is None else self.at_end
        return name if len(known) == len(parts) or known[name] >= whole / 2 else ""

    def in_words(self, part: str) -> str:
        """The share of a part in per cent, with its standard error where it has one."""
        error = self.errors.get(part)
        return f"{getattr(self, part):.1%}" + (f" \u00b1 {error:.1%}" if error is not None else "")


def clip_causes(figures: Sequence[Mapping[str, float]]) -> ClipCauses | None:
    """The causes over some steps; None where none of them knows the share outside at its first weights.

    Means are over the steps that know the end too, if there are some. The noise is that of these steps if all of them
    know it, else the mean of all steps that do.
    """
    every = [step for step in figures if "outside_clip_at_start" in step]
    if not every:
        return None
    looked = [step for step in every if "outside_clip_at_end" in step]
    steps = looked or every
    values = {"at_start": [step["outside_clip_at_start"] for step in steps]}
    if looked:
        values["at_end"] = [step["outside_clip_at_end"] for step in looked]
        values["movement"] = [end - start for end, start in zip(values["at_end"], values["at_start"], strict=True)]
    noisy = steps if all("outside_clip_noise" in step for step in steps) else every
    values["noise"] = [step["outside_clip_noise"] for step in noisy if "outside_clip_noise" in step]
    means = {name: fmean(shares) for name, shares in values.items() if shares}
    errors = {name: stdev(shares) / math.sqrt(len(shares)) for name, shares in values.items() if len(shares) > 1}
    if {"at_start", "noise"} <= errors.keys():
        errors["lag"] = math.hypot(errors["at_start"], errors["noise"])
    clips = [step["noise_clip"] for step in figures if "noise_clip" in step]
    return ClipCauses(
        trained=fmean(step["outside_clip_sequences"] for step in steps),
        at_start=means["at_start"],
        at_end=means.get("at_end"),
        movement=means.get("movement"),
        noise=means.get("noise"),
        lag=means["at_start"] - means["noise"] if "noise" in means else None,
        noise_clip=clips[-1] if clips else None,
        num_steps=len(steps),
        num_measured=len(values["noise"]),
        errors=errors,
    )


def clip_causes_line(figures: Sequence[Mapping[str, float]], config: Config) -> str:
    """The causes over some steps in a sentence without its full stop; empty where none of them has a split."""
    causes = clip_causes(figures)
    if causes is None:
        return ""
    num = sum("outside_clip_at_start" in step for step in figures)
    start = f"Outside the clip: before a step's first update {causes.in_words('at_start')} of sequences"
    if config.algorithm.old_logprobs == "recompute":
        start += " (with old_logprobs: recompute, neither noise nor lag is in the ratio)"
    elif causes.noise is not None:
        seldom = f" (measured in {causes.num_measured} of {num} steps)" if causes.num_measured < num else ""
        start += f", {causes.in_words('noise')} by the engines' noise{seldom} and {causes.in_words('lag')} by lag"
    else:
        why = "learner.mismatch_every: 0" if not config.learner.mismatch_every else "the noise is not measured yet"
        start += f", by noise and lag together ({why})"
    mean = f"mean of {causes.num_steps} of {num} steps"
    scatter = " \u00b1 standard error" if causes.num_steps > 1 else ""
    if causes.at_end is not None:
        end = (
            f"{causes.in_words('at_end')} of the same sequences, {causes.in_words('movement')} by the policy's movement"
        )
        return f"{start}; after its last update {end} ({mean}{scatter})"
    if config.algorithm.updates_per_step == 1:
        return f"{start} ({mean}{scatter}); a step's only update comes after the clip"
    every = config.learner.clip_split_every
    yet = f"not measured{' yet' if every else ''} (learner.clip_split_every: {every})"
    return f"{start} ({mean}{scatter}); what its updates add is {yet}"


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
    narrowest = f"; 1% would be outside a clip of {clips[-1]:.2g} on both sides" if clips and clips[-1] else ""
    return f"{_NOISE} puts {measured[-1]:.0%} outside the clip, {when}{narrowest}"
