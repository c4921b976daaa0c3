"""What age has cost: waits and dropped answers since the step before."""

from __future__ import annotations

from gspo.learner.assembly.settlements import SettledGroup, Settlement
from gspo.learner.assembly.staleness_cost import StalenessCost


def test_each_step_has_what_age_cost_since_the_one_before() -> None:
    cost = StalenessCost()
    cost.waited(1.5)
    cost.waited(0.5)
    cost.ended([SettledGroup(1, Settlement.STALE, "old", (10, 40)), SettledGroup(2, Settlement.FILTERED, "equal")])
    cost.ended([SettledGroup(3, Settlement.STALE, "old", (100,))])
    assert cost.figures() == {
        "wait_old_s": 2.0,
        "dropped_rollouts": 3.0,
        "dropped_tokens": 150.0,
        "dropped_response_tokens_mean": 50.0,
        "dropped_response_tokens_max": 100.0,
    }
    assert cost.figures() == {"wait_old_s": 0.0, "dropped_rollouts": 0.0, "dropped_tokens": 0.0}
