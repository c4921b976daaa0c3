"""The end of the learner's run: its reasons, and the wait for the coordinator at the end."""

from __future__ import annotations

import asyncio

import pytest

from gspo.common.config.schema import RunConfig
from gspo.learner.run_end import RunEndCondition, RunFailedError
from gspo_proto.rollout_pb2 import RUN_END_COMPLETED, RUN_END_STOPPED, RUN_END_UNSPECIFIED


def test_the_run_ends_at_its_last_step_or_hour_and_a_stop_comes_first() -> None:
    end = RunEndCondition(RunConfig.model_validate({"total_steps": 3, "total_hours": 0.5}))
    assert end.reason(2, 1799.0) == ""
    assert end.reason(2, 1800.0) == "total_hours 0.5 reached"
    assert end.reason(3, 0.0) == "total_steps 3 reached"
    end.use_up_prompts()
    assert (end.reason(0, 0.0), end.kind) == ("all prompts are used", RUN_END_UNSPECIFIED)
    end.stop("Ctrl-C")
    assert end.reason(3, 0.0) == "stopped: Ctrl-C"


@pytest.mark.parametrize(("stops", "kind"), [(False, RUN_END_COMPLETED), (True, RUN_END_STOPPED)])
def test_training_that_is_done_has_a_kind_of_end(stops: bool, kind: int) -> None:
    end = RunEndCondition(RunConfig())
    if stops:
        end.stop("a user")
    end.finish_training("a reason")
    assert (end.done_reason, end.kind) == ("a reason", kind)


async def test_a_coordinator_that_never_finishes_the_run_fails_it_after_the_wait() -> None:
    end = RunEndCondition(RunConfig())
    polls: list[int] = []

    async def on_poll() -> None:
        polls.append(len(polls))

    with pytest.raises(RunFailedError, match=r"the coordinator did not finish the run within 0\.1 s"):
        await end.wait_for_finished(0.1, on_poll)
    assert polls == [0]
    end.finished.set()
    async with asyncio.timeout(5):
        await end.wait_for_finished(60.0, on_poll)
    assert polls == [0], "groups are settled after the end"
