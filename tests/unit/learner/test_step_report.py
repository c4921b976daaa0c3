"""The clock of a step: every phase once, the time between two steps, an evaluation that delays the first.

The causes of a wait are by the timeline of the rollout that came last, with invented times.
"""

from __future__ import annotations

import time

import pytest

from gspo.common.service.traces import Traces
from gspo.common.telemetry.step_time import seconds_by_cause
from gspo.learner.step_report import RolloutTimeline, StepClock, StepPhase, rollouts_at_once, seconds_waited
from gspo_proto.rollout_pb2 import Rollout, Score, ScoredRollout

# Issued at 10, started at 12, finished at 15, scored at 18.
LAST = RolloutTimeline(group=1, number=0, issued=10, started=12, finished=15, scored=18, function="slow")
EARLIER = RolloutTimeline(group=1, number=1, issued=10, started=10, finished=11, scored=12, function="quick")


@pytest.fixture
def clock() -> StepClock:
    return StepClock(Traces("learner", name="learner-0", run="r", endpoint=None))


def metrics_of_a_step(clock: StepClock, *, evaluated_s_ago: float) -> dict[str, float]:
    """The metrics of a step of one rollout that was waited for 10 s and issued 2 s ago."""
    now = time.time()
    timeline = RolloutTimeline(
        group=1, number=0, issued=now - 2, started=now - 2, finished=now - 1, scored=now, function=""
    )
    clock.begin(
        [timeline],
        waited_since_s=time.monotonic() - 10,
        live_unix_s=now - 8,
        evaluated_unix_s=now - evaluated_s_ago,
    )
    clock.end_phase(StepPhase.LOG)
    clock.end_training(probe_s=0.125, clip_split_s=0.25)
    for phase in (StepPhase.MAKE_VERSION, StepPhase.HOLD):
        clock.end_phase(phase)
    return clock.end_step(1)


def test_the_time_of_a_step_is_split_by_phase_and_by_cause(clock: StepClock) -> None:
    first = metrics_of_a_step(clock, evaluated_s_ago=5)
    assert first["wait_s"] == pytest.approx(10, abs=0.5)
    assert first["step_s"] == sum(first.get(phase, 0.0) for phase in StepPhase)
    assert (first["probe_s"], first["clip_split_s"]) == (0.125, 0.25)
    assert (first["checkpoint_s"], first["record_s"]) == (0, 0), "nothing came before the first step"
    by_cause = seconds_by_cause(first)
    expected = {"push": 2, "evaluation": 3, "issue": 3, "queue": 0, "generation": 1, "reward": 1}
    assert {cause: by_cause[cause] for cause in expected} == pytest.approx(expected, abs=0.5)


def test_between_two_steps_a_checkpoint_counts_and_an_evaluation_blocks_nothing(clock: StepClock) -> None:
    metrics_of_a_step(clock, evaluated_s_ago=5)
    clock.add_between("checkpoint_s", 0.25)
    second = metrics_of_a_step(clock, evaluated_s_ago=5)
    assert second["checkpoint_s"] == 0.25
    assert second["wait_evaluation_s"] == 0
    assert second["wait_issue_s"] == pytest.approx(6, abs=0.5)
    assert metrics_of_a_step(clock, evaluated_s_ago=5)["checkpoint_s"] == 0


def test_a_clock_that_is_set_while_the_learner_waits_does_not_make_the_step_longer(
    clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s, set_to_unix_s = time.monotonic() - 3, time.time() + 600
    monkeypatch.setattr(time, "time", lambda: set_to_unix_s)
    clock.begin([], waited_since_s=began_s, live_unix_s=0.0, evaluated_unix_s=0.0)
    assert clock.end_step(1)["wait_s"] == pytest.approx(3, abs=0.5)


def waited(began: float, ended: float, live: float = 0.0, evaluated: float = 0.0) -> dict[str, float]:
    """The seconds of each cause that took any."""
    waited = seconds_waited([LAST, EARLIER], began=began, ended=ended, live=live, evaluated=evaluated)
    parts = {name: seconds for name, seconds in waited.items() if "_by_" not in name}
    assert sum(parts.values()) == pytest.approx(ended - began)
    return {name: seconds for name, seconds in waited.items() if seconds}


def test_each_station_of_the_last_rollout_has_its_part_of_the_wait() -> None:
    assert waited(9, 19, live=9.5) == {
        "wait_push_s": 0.5, "wait_issue_s": 0.5, "wait_queue_s": 2, "wait_generation_s": 3, "wait_reward_s": 3,
        "wait_reward_by_slow_s": 3, "wait_intake_s": 1,
    }  # fmt: skip


def test_what_was_over_when_the_wait_began_is_no_part_of_it() -> None:
    assert waited(14, 18, live=9.5) == {"wait_generation_s": 1, "wait_reward_s": 3, "wait_reward_by_slow_s": 3}
    assert waited(18.5, 19) == {"wait_intake_s": 0.5}


def test_a_push_while_rollouts_are_made_is_not_waited_for() -> None:
    assert "wait_push_s" not in waited(11, 19, live=14)


def test_an_evaluation_holds_up_the_issue_after_the_push() -> None:
    assert waited(4, 10, live=5, evaluated=9) == {"wait_push_s": 1, "wait_evaluation_s": 4, "wait_issue_s": 1}


def test_the_slowest_function_is_the_one_that_was_waited_for() -> None:
    score = Score(reward=1.0, scored_unix_s=18, seconds={"quick": 0.5, "slow": 1.5})
    timeline = RolloutTimeline.of(ScoredRollout(rollout=Rollout(group=3, finished_unix_s=15), score=score))
    assert (timeline.function, timeline.scored) == ("slow", 18)


def test_a_step_of_given_up_groups_alone_waited_for_the_intake() -> None:
    assert seconds_waited([], began=1, ended=3, live=0, evaluated=0) == {"wait_intake_s": 2}


def test_rollouts_at_once_are_the_mean_over_the_time_from_the_first_start_to_the_last_end() -> None:
    times = [(0.0, 0.0), (10.0, 14.0), (12.0, 16.0), (16.0, 18.0)]
    timelines = [RolloutTimeline(0, n, 9.0, started, finished, 20.0, "") for n, (started, finished) in enumerate(times)]
    assert rollouts_at_once(timelines) == {"rollouts_at_once": 10 / 8}
    assert rollouts_at_once(timelines[:1]) == {}
