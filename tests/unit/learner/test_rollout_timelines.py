"""The causes of a wait, by the timeline of the rollout that came last, with invented times."""

from __future__ import annotations

import pytest

from gspo.learner.telemetry.rollout_timelines import RolloutTimeline, RolloutTimelines, StepWait, seconds_waited
from gspo_proto.rollout_pb2 import Rollout, Score, ScoredRollout

# Issued at 10, started at 12, finished at 15, taken at 16, scored at 18.
LAST = RolloutTimeline(group=1, number=0, issued=10, started=12, finished=15, taken=16, scored=18, function="slow")
EARLIER = RolloutTimeline(group=1, number=1, issued=10, started=10, finished=11, taken=11, scored=12, function="quick")


def waited(began: float, ended: float, live: float = 0.0, evaluated: float = 0.0) -> dict[str, float]:
    """The seconds of each cause that took any."""
    waited = seconds_waited([LAST, EARLIER], StepWait(began, ended, live, evaluated))
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
    timelines = RolloutTimelines()
    score = Score(reward=1.0, scored_unix_s=18, taken_unix_s=16, seconds={"quick": 0.5, "slow": 1.5})
    timelines.add(ScoredRollout(rollout=Rollout(group=3, finished_unix_s=15), score=score))
    assert [(journey.function, journey.taken) for journey in timelines.take([3])] == [("slow", 16)]
    assert timelines.take([3]) == []


def test_a_step_of_given_up_groups_alone_waited_for_the_intake() -> None:
    assert seconds_waited([], StepWait(1, 3, 0, 0)) == {"wait_intake_s": 2}
