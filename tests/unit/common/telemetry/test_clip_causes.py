"""Why sequences are outside the clip, over steps and in words. An unknown part stays unknown."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.common.telemetry.clip_causes import clip_causes, clip_causes_line
from tests.unit.common.telemetry.test_clip_rules import configured


def step(trained: float, start: float, end: float | None = None, **more: float) -> dict[str, float]:
    looked = {} if end is None else {"outside_clip_at_end": end}
    return {"outside_clip_sequences": trained, "outside_clip_at_start": start, **looked, **more}


def test_the_parts_are_means_that_add_up() -> None:
    steps = [step(0.5, 0.4, 0.6, outside_clip_noise=0.1, noise_clip=0.002), step(0.3, 0.2, 0.4), {"reward_mean": 1.0}]
    causes = clip_causes(steps)
    assert causes is not None
    assert (causes.trained, causes.at_start, causes.at_end) == pytest.approx((0.4, 0.3, 0.5))
    assert (causes.noise, causes.lag, causes.movement) == pytest.approx((0.1, 0.2, 0.2))
    assert (causes.noise_clip, causes.num_steps, causes.num_measured) == (0.002, 2, 1)


def test_movement_is_of_the_steps_that_looked_at_the_same_sequences_twice() -> None:
    """Other steps know only their start. The noise of the two is taken where both know it."""
    noisy = [step(0.5, 0.4, 0.7, outside_clip_noise=0.1), step(0.5, 0.2, 0.5, outside_clip_noise=0.2)]
    causes = clip_causes([*noisy, *[step(0.9, 0.9, outside_clip_noise=0.9)] * 8])
    assert causes is not None
    assert (causes.at_start, causes.noise, causes.lag, causes.movement) == pytest.approx((0.3, 0.15, 0.15, 0.3))
    assert (causes.num_steps, causes.num_measured) == (2, 2)
    assert causes.errors["movement"] == pytest.approx(0.0)
    assert clip_causes([step(0.5, 0.4, 0.7), step(0.9, 0.9, outside_clip_noise=0.9)]).noise == 0.9  # type: ignore[union-attr]


def test_a_part_below_zero_by_chance_stays_so_and_has_its_error() -> None:
    causes = clip_causes([step(0.3, 0.4, 0.3, outside_clip_noise=0.45), step(0.3, 0.3, 0.3), step(0.3, 0.35, 0.3)])
    assert causes is not None
    assert (causes.noise, causes.lag, causes.movement) == pytest.approx((0.45, -0.1, -0.05))
    # A standard deviation of 0.05 over three steps; one measured noise has no error, and so has none of the lag.
    assert causes.errors == pytest.approx({"at_end": 0.0, "at_start": 0.05 / 3**0.5, "movement": 0.05 / 3**0.5})
    assert causes.in_words("movement") == "-5.0% ± 2.9%"


def test_the_largest_cause_is_said_where_no_unknown_part_can_be_larger() -> None:
    cases = {
        "movement": step(0.5, 0.2, 0.6, outside_clip_noise=0.1),
        "lag": step(0.5, 0.4, outside_clip_noise=0.1),
        "noise": step(0.5, 0.3, outside_clip_noise=0.3),
        "": step(0.5, 0.3, outside_clip_noise=0.1),
    }
    for largest, figures in cases.items():
        causes = clip_causes([figures])
        assert causes is not None and causes.largest == largest
    unknown = clip_causes([step(0.5, 0.3)])
    assert unknown is not None and unknown.largest == ""


def test_an_unknown_part_is_no_zero(minimal: dict[str, Any]) -> None:
    steps = [step(0.42, 0.3)] * 2
    causes = clip_causes(steps)
    assert causes is not None
    assert (causes.noise, causes.lag, causes.movement, causes.largest) == (None, None, None, "")
    lagging = configured(minimal, staleness={"max_lag": 1})
    assert clip_causes_line(steps, lagging) == (
        "Outside the clip: before a step's first update 30.0% ± 0.0% of sequences, by noise and lag together (the "
        "noise is not measured yet) (mean of 2 of 2 steps ± standard error); what its updates add is not measured yet "
        "(learner.clip_split_every: 20)"
    )
    off = configured(minimal, staleness={"max_lag": 1}, learner={"mismatch_every": 0, "clip_split_every": 0})
    assert "together (learner.mismatch_every: 0)" in clip_causes_line(steps, off)
    assert clip_causes_line(steps, off).endswith("add is not measured (learner.clip_split_every: 0)")
    recompute = configured(minimal, algorithm={"old_logprobs": "recompute"})
    line = clip_causes_line([step(0.1, 0.0, 0.1)], recompute)
    assert line == (
        "Outside the clip: before a step's first update 0.0% of sequences (with old_logprobs: recompute, neither noise "
        "nor lag is in the ratio); after its last update 10.0% of the same sequences, 10.0% by the policy's movement "
        "(mean of 1 of 1 steps)"
    )
    single = configured(minimal, algorithm={"num_mini_batches": 1})
    assert clip_causes_line([step(0.1, 0.1)], single).endswith("a step's only update comes after the clip")


def test_known_parts_are_in_the_sentence(minimal: dict[str, Any]) -> None:
    line = clip_causes_line([step(0.42, 0.33, 0.42, outside_clip_noise=0.03)], configured(minimal))
    assert line == (
        "Outside the clip: before a step's first update 33.0% of sequences, 3.0% by the engines' noise and 30.0% by "
        "lag; after its last update 42.0% of the same sequences, 9.0% by the policy's movement (mean of 1 of 1 steps)"
    )
    steps = [step(0.42, 0.33, 0.42, outside_clip_noise=0.03), step(0.42, 0.33)]
    assert "3.0% by the engines' noise (measured in 1 of 2 steps) and " in clip_causes_line(steps, configured(minimal))
    assert clip_causes_line([{"reward_mean": 1.0}], configured(minimal)) == ""
    assert clip_causes([]) is None
