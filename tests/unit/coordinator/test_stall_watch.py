"""When nothing moves: every service waits for another for a lease time, and no legitimate wait counts as that."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.common.streams.instances import Instance
from gspo.coordinator.stall_watch import StallClock, every_service_waits, in_words

STILL = {
    "learner": ("waiting", "rollouts"),
    "reward": ("waiting", "rollouts"),
    "generation": ("waiting", "prompts"),
}
WITH_AGENTS = {**STILL, "generation": ("waiting", "requests"), "gateway": ("waiting", "prompts")}


def instances(activities: dict[str, tuple[str, str]], facts: dict[str, dict[str, Any]] | None = None) -> list[Instance]:
    return [
        Instance(service, f"{service}-0", activity={"kind": kind, "what": what}, facts=(facts or {}).get(service, {}))
        for service, (kind, what) in activities.items()
    ]


def test_a_stalled_run_is_issued_again_after_the_limit_and_ended_after_another() -> None:
    clock = StallClock(30.0)
    remedies = [clock.look(float(second), all_wait=True, moved=0, done=0) for second in range(100, 165)]
    assert [(second, remedy) for second, remedy in enumerate(remedies) if remedy] == [(30, "issue again"), (60, "end")]


def test_what_was_settled_in_between_gives_the_run_another_attempt() -> None:
    clock = StallClock(30.0)
    remedies = [clock.look(float(second), all_wait=True, moved=0, done=second > 140) for second in range(100, 190)]
    assert [remedy for remedy in remedies if remedy] == ["issue again", "issue again"]


def test_issuing_again_without_a_result_is_not_repeated_for_ever() -> None:
    """Tokens flow again for a while, but no group is settled."""
    clock = StallClock(30.0)
    remedies = [clock.look(float(second), all_wait=True, moved=second < 40, done=0) for second in range(90)]
    assert [remedy for remedy in remedies if remedy] == ["issue again", "end"]


@pytest.mark.parametrize("moves", [{"all_wait": False}, {"moved": 1}])
def test_work_and_movement_begin_the_time_anew(moves: dict[str, Any]) -> None:
    clock = StallClock(30.0)
    for second in range(200):
        still: dict[str, Any] = {"all_wait": True, "moved": 0, "done": 0}
        assert clock.look(float(second), **(still | (moves if second % 29 == 0 else {}))) is None


def test_time_in_which_this_process_did_not_look_does_not_count() -> None:
    """A laptop's sleep, or a Redis whose disk answers after a minute."""
    clock = StallClock(30.0)
    assert [clock.look(60.0 * minute, all_wait=True, moved=0, done=0) for minute in range(10)] == [None] * 10


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"generation": ("busy", "generating")}, {}),
        ({"generation": ("busy", "starting vLLM")}, {}),
        ({"generation": ("waiting", "reward")}, {}),
        ({"generation": ("waiting", "weights")}, {"generation": {"takes_weights": True}}),
        ({"reward": ("busy", "scoring")}, {}),
        ({"reward": ("waiting", "teacher")}, {}),
        ({"learner": ("busy", "training")}, {}),
        ({"learner": ("waiting", "evaluation")}, {}),
        ({"learner": ("waiting", "disk space")}, {}),
        ({}, {"learner": {"works_beside": True}}),
    ],
)
def test_no_legitimate_wait_counts(changes: dict[str, tuple[str, str]], facts: dict[str, dict[str, Any]]) -> None:
    assert every_service_waits(instances(STILL))
    assert not every_service_waits(instances(STILL | changes, facts))


@pytest.mark.parametrize("missing", STILL)
def test_a_service_that_is_not_registered_is_awaited(missing: str) -> None:
    """It starts, or is started again; its supervisor has a deadline."""
    assert not every_service_waits([each for each in instances(STILL) if each.service != missing])


def test_a_users_agents_are_waited_for_without_a_limit() -> None:
    assert every_service_waits(instances(WITH_AGENTS), with_agents=True)
    played = instances({**WITH_AGENTS, "gateway": ("waiting", "agents")})
    assert not every_service_waits(played, with_agents=True)
    assert not every_service_waits(instances({**WITH_AGENTS, "agents": ("busy", "playing")}), with_agents=True)
    # Outside clients of the gateway have no part in a run without agents.
    assert every_service_waits(instances({**STILL, "gateway": ("busy", "answering")}))


def test_the_chain_names_every_wait() -> None:
    assert in_words(instances(STILL), ("slots", "to be free: of 8, 8 hold open groups")) == (
        "learner-0 waits for rollouts <- reward-0 waits for rollouts <- generation-0 waits for prompts"
        " <- coordinator waits for slots to be free: of 8, 8 hold open groups"
    )
