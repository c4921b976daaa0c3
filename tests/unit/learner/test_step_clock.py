"""The clock of a step: every phase once, the time between two steps, and an evaluation that delays the first."""

from __future__ import annotations

import time

import pytest

from gspo.common.service.traces import Traces
from gspo.common.telemetry.step_time import seconds_by_cause
from gspo.learner.telemetry.rollout_timelines import RolloutTimeline
from gspo.learner.telemetry.step_clock import STEP_PHASES, StepClock


@pytest.fixture
def clock() -> StepClock:
    return StepClock(Traces("learner", name="learner-0", run="r", endpoint=None))


def metrics_of_a_step(clock: StepClock, *, evaluated_s_ago: float) -> dict[str, float]:
    """The metrics of a step of one rollout that was waited for 10 s and issued 2 s ago."""
    now = time.time()
    timeline = RolloutTimeline(
        group=1, number=0, issued=now - 2, started=now - 2, finished=now - 1, taken=now - 1, scored=now, function=""
    )
    clock.begin(
        [timeline],
        waited_since_s=time.monotonic() - 10,
        live_unix_s=now - 8,
        evaluated_unix_s=now - evaluated_s_ago,
    )
    for phase in STEP_PHASES[1:]:
        clock.end_phase(phase)
    return clock.metrics()


def test_the_time_of_a_step_is_split_by_phase_and_by_cause(clock: StepClock) -> None:
    first = metrics_of_a_step(clock, evaluated_s_ago=5)
    assert first["wait_s"] == pytest.approx(10, abs=0.5)
    assert first["step_s"] == sum(first[name] for name in ("wait_s", "log_s", "train_s", "publish_s", "hold_s"))
    assert (first["checkpoint_s"], first["record_s"]) == (0, 0), "nothing came before the first step"
    by_cause = seconds_by_cause(first)
    expected = {"push": 2, "evaluation": 3, "issue": 3, "queue": 0, "generation": 1, "reward": 1}
    assert {cause: by_cause[cause] for cause in expected} == pytest.approx(expected, abs=0.5)


def test_between_two_steps_a_checkpoint_counts_and_an_evaluation_blocks_nothing(clock: StepClock) -> None:
    metrics_of_a_step(clock, evaluated_s_ago=5)
    clock.add_checkpoint(0.25)
    second = metrics_of_a_step(clock, evaluated_s_ago=5)
    assert second["checkpoint_s"] == 0.25
    assert (second["wait_evaluation_s"], second["wait_issue_s"]) == (0, pytest.approx(6, abs=0.5))
    assert metrics_of_a_step(clock, evaluated_s_ago=5)["checkpoint_s"] == 0


def test_a_clock_that_is_set_while_the_learner_waits_does_not_make_the_step_longer(
    clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s, set_to_unix_s = time.monotonic() - 3, time.time() + 600
    monkeypatch.setattr(time, "time", lambda: set_to_unix_s)
    clock.begin([], waited_since_s=began_s, live_unix_s=0.0, evaluated_unix_s=0.0)
    assert clock.metrics()["wait_s"] == pytest.approx(3, abs=0.5)
