"""Why sequences are outside the clip, over steps and in words. An unknown part stays unknown."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.common.telemetry.clip_causes import clip_causes, clip_causes_line
from tests.unit.common.telemetry.test_clip_rules import configured


def step(outside: float, start: float, **more: float) -> dict[str, float]:
    return {"outside_clip_sequences": outside, "outside_clip_at_start": start, **more}


def test_the_parts_are_means_that_add_up() -> None:
    steps = [step(0.5, 0.4, outside_clip_noise=0.1, noise_clip=0.002), step(0.3, 0.2), {"reward_mean": 1.0}]
    causes = clip_causes(steps)
    assert causes is not None
    assert (causes.outside, causes.at_start) == pytest.approx((0.4, 0.3))
    assert (causes.noise, causes.lag, causes.movement) == pytest.approx((0.1, 0.2, 0.1))
    assert (causes.noise_clip, causes.largest) == (0.002, "lag")


def test_a_part_below_zero_by_chance_stays_so_and_has_its_error() -> None:
    causes = clip_causes([step(0.3, 0.4, outside_clip_noise=0.45), step(0.3, 0.3), step(0.3, 0.35)])
    assert causes is not None
    assert (causes.noise, causes.lag, causes.movement) == pytest.approx((0.45, -0.1, -0.05))
    # A standard deviation of 0.05 over three steps; one measured noise has no error, and so has none of the lag.
    assert causes.errors == pytest.approx({"outside": 0.0, "at_start": 0.05 / 3**0.5, "movement": 0.05 / 3**0.5})
    assert causes.in_words("movement") == "-5.0% ± 2.9%"


def test_an_unknown_part_is_no_zero(minimal: dict[str, Any]) -> None:
    steps = [step(0.42, 0.3)] * 2
    causes = clip_causes(steps)
    assert causes is not None
    assert (causes.noise, causes.lag, causes.largest) == (None, None, "")
    lagging = configured(minimal, staleness={"max_lag": 1})
    assert clip_causes_line(steps, lagging) == (
        "Outside the clip: 42.0% ± 0.0% of sequences, mean of 2 steps ± standard error: 30.0% ± 0.0% by noise and lag "
        "together (the noise is not measured yet), 12.0% ± 0.0% by the policy's movement within a step"
    )
    off = configured(minimal, staleness={"max_lag": 1}, learner={"mismatch_every": 0})
    assert "together (learner.mismatch_every: 0)" in clip_causes_line(steps, off)
    recompute = configured(minimal, algorithm={"old_logprobs": "recompute"})
    line = clip_causes_line([step(0.1, 0.0)], recompute)
    assert "10.0% by the policy's movement within a step; with old_logprobs: recompute, neither noise nor lag" in line
    assert "by lag" not in line and "0.0%" not in line.replace("10.0%", "")


def test_known_parts_are_in_the_sentence(minimal: dict[str, Any]) -> None:
    line = clip_causes_line([step(0.42, 0.33, outside_clip_noise=0.03)], configured(minimal))
    assert line.endswith("42.0% of sequences: 3.0% by the engines' noise, 30.0% by lag, 9.0% by the policy's movement "
                         "within a step")  # fmt: skip
    steps = [step(0.42, 0.33, outside_clip_noise=0.03), step(0.42, 0.33)]
    assert "3.0% by the engines' noise (measured in 1 of 2 steps), " in clip_causes_line(steps, configured(minimal))
    assert clip_causes_line([{"reward_mean": 1.0}], configured(minimal)) == ""
    assert clip_causes([]) is None
