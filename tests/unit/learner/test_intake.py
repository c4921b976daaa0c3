"""The account of the groups that were not trained since the step before, and of the staleness that caused it."""

from __future__ import annotations

from gspo.learner.assembly.settlements import EndedGroup, GroupEnding
from gspo.learner.intake import UntrainedGroups


def test_each_step_has_what_was_not_trained_since_the_one_before() -> None:
    untrained = UntrainedGroups()
    untrained.add_wait(1.5)
    untrained.add_wait(0.5)
    untrained.add([EndedGroup(1, GroupEnding.STALE, "old", (10, 40)), EndedGroup(2, GroupEnding.FILTERED, "equal")])
    untrained.add([EndedGroup(3, GroupEnding.STALE, "old", (100,)), EndedGroup(4, GroupEnding.UNUSED, "the end")])
    assert untrained.take_metrics() == {
        "groups_filtered": 1.0,
        "groups_stale": 2.0,
        "groups_failed": 0.0,
        "wait_old_s": 2.0,
        "dropped_rollouts": 3.0,
        "dropped_tokens": 150.0,
        "dropped_response_tokens_mean": 50.0,
        "dropped_response_tokens_max": 100.0,
    }
    assert set(untrained.take_metrics().values()) == {0.0}
