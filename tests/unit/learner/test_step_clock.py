"""The clock of a step: every phase once, what came between two steps, and an evaluation that holds up the first."""

from __future__ import annotations

import time

import pytest

from gspo.common.service.traces import Traces
from gspo.common.telemetry.step_time import seconds_by_cause
from gspo.learner.telemetry.rollout_timelines import RolloutTimelines
from gspo.learner.telemetry.step_clock import StepClock
from gspo_proto.rollout_pb2 import Rollout, Score, ScoredRollout


def a_step(clock: StepClock, timelines: RolloutTimelines, group: int, *, evaluated_s_ago: float) -> dict[str, float]:
    """The figures of a step of one rollout that was waited for 10 s and issued 2 s ago."""
    now = time.time()
    rollout = Rollout(group=group, issued_unix_s=now - 2, started_unix_s=now - 2, finished_unix_s=now - 1)
    score = Score(reward=1.0, taken_unix_s=now - 1, scored_unix_s=now)
    timelines.add(ScoredRollout(rollout=rollout, score=score))
    clock.wait_over(time.monotonic() - 10, live_unix_s=now - 8, evaluated_unix_s=now - evaluated_s_ago)
    clock.begin([group])
    for phase in ("log_s", "train_s", "publish_s", "hold_s"):
        clock.over(phase)
    return clock.figures()


def test_the_time_of_a_step_is_split_by_phase_and_by_cause() -> None:
    timelines = RolloutTimelines()
    clock = StepClock(timelines, Traces("learner", name="learner-0", run="r", endpoint=None))
    first = a_step(clock, timelines, 1, evaluated_s_ago=5)
    assert first["wait_s"] == pytest.approx(10, abs=0.5)
    assert first["step_s"] == sum(first[name] for name in ("wait_s", "log_s", "train_s", "publish_s", "hold_s"))
    assert (first["checkpoint_s"], first["record_s"]) == (0, 0), "nothing came before the first step"
    by_cause = seconds_by_cause(first)
    expected = {"push": 2, "evaluation": 3, "issue": 3, "queue": 0, "generation": 1, "reward": 1}
    assert {cause: by_cause[cause] for cause in expected} == pytest.approx(expected, abs=0.5)


def test_between_two_steps_a_checkpoint_counts_and_an_evaluation_blocks_nothing() -> None:
    timelines = RolloutTimelines()
    clock = StepClock(timelines, Traces("learner", name="learner-0", run="r", endpoint=None))
    a_step(clock, timelines, 1, evaluated_s_ago=5)
    clock.checkpoint(0.25)
    second = a_step(clock, timelines, 2, evaluated_s_ago=5)
    assert second["checkpoint_s"] == 0.25
    assert (second["wait_evaluation_s"], second["wait_issue_s"]) == (0, pytest.approx(6, abs=0.5))
    assert a_step(clock, timelines, 3, evaluated_s_ago=5)["checkpoint_s"] == 0


def test_a_clock_that_is_set_while_the_learner_waits_does_not_make_the_step_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = StepClock(RolloutTimelines(), Traces("learner", name="learner-0", run="r", endpoint=None))
    began, set_to = time.monotonic() - 3, time.time() + 600
    monkeypatch.setattr(time, "time", lambda: set_to)
    clock.wait_over(began, live_unix_s=0.0, evaluated_unix_s=0.0)
    clock.begin([])
    assert clock.figures()["wait_s"] == pytest.approx(3, abs=0.5)
