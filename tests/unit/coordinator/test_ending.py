"""How a run ends: what it waits for, and that no wait is without an end."""

from __future__ import annotations

import pytest

from gspo.common.config.schema import RunConfig
from gspo.coordinator.ending import Ending
from gspo_proto.rollout_pb2 import RUN_END_COMPLETED, RUN_END_FAILED, RUN_END_STOPPED


def ending(**keys: float) -> Ending:
    return Ending(RunConfig.model_validate({"total_steps": 1} | keys))


def test_after_the_last_step_the_end_waits_for_its_version() -> None:
    end = ending()
    assert (end.over, end.conclude(0)) == (False, None)
    end.on_training_done(5, RUN_END_COMPLETED, "5 steps are done")
    assert (end.over, end.stopped, end.ready_to_measure(4), end.conclude(4)) == (True, False, False, None)
    assert end.ready_to_measure(5)
    finished = end.conclude(5)
    assert finished is not None
    assert (finished.reason, finished.end) == ("5 steps are done", RUN_END_COMPLETED)


def test_the_end_waits_for_groups_that_were_issued_while_the_last_step_was_trained() -> None:
    end = ending()
    end.on_training_done(5, RUN_END_COMPLETED, "5 steps are done")
    assert end.conclude(5, num_open=2) is None
    assert end.describe(5, num_open=2) == ("learner", "to settle the last 2 groups")
    assert end.conclude(5, num_open=0) is not None
    late = ending(start_timeout_s=1e-9)
    late.on_training_done(5, RUN_END_COMPLETED, "5 steps are done")
    finished = late.conclude(5, num_open=2)
    assert finished is not None
    assert finished.end == RUN_END_FAILED
    assert "did not settle the last 2 groups" in finished.reason


def test_a_stop_waits_for_the_learner_and_for_nothing_else() -> None:
    end = ending()
    end.on_stop("enough")
    assert (end.over, end.stopped, end.conclude(0)) == (True, True, None)
    assert end.describe(0) == ("learner", "to end after a stop (enough)")
    end.on_training_done(5, RUN_END_STOPPED, "stopped: enough")
    finished = end.conclude(0)
    assert finished is not None
    assert (finished.reason, finished.end) == ("stopped: enough", RUN_END_STOPPED)
    assert not end.ready_to_measure(5)


@pytest.mark.parametrize("stop", [True, False])
def test_every_wait_has_an_end(stop: bool) -> None:
    end = ending(drain_timeout_s=1e-9, start_timeout_s=1e-9)
    if stop:
        end.on_stop("enough")
    else:
        end.on_training_done(5, RUN_END_COMPLETED, "5 steps are done")
    finished = end.conclude(4)
    assert finished is not None
    assert finished.end == RUN_END_FAILED
    key = "run.drain_timeout_s" if stop else "run.start_timeout_s"
    assert key in finished.reason


def test_a_stop_after_the_end_of_training_changes_nothing() -> None:
    end = ending()
    end.on_training_done(5, RUN_END_COMPLETED, "5 steps are done")
    end.on_stop("enough")
    assert not end.stopped


def test_a_run_is_stopped_by_its_end_and_not_by_the_words_of_its_reason() -> None:
    end = ending()
    end.on_training_done(5, RUN_END_COMPLETED, "stopped by the moon")
    assert not end.stopped
    assert end.ready_to_measure(5)
