"""The verdict on a run: from figures made up by hand, one stage slow at a time.

Runs whose stages are really slow are in tests/integration/run/test_bottleneck.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from gspo.common.config.schema import Config
from gspo.common.telemetry.advice import verdict

# A step in which nothing takes long.
QUICK = {"wait_queue_s": 0.1, "wait_generation_s": 0.1, "wait_reward_s": 0.1, "train_s": 0.1, "publish_s": 0.05}


def config_with(max_lag: int, **sections: dict[str, Any]) -> Config:
    given = {
        "name": "r",
        "model": {"path": "."},
        "data": {"prompts": "p.jsonl"},
        "reward": {"functions": [{"path": "r.py"}]},
        "run": {"total_steps": 3},
        "staleness": {"max_lag": max_lag},
        **sections,
    }
    return Config.model_validate(given)


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize(
    ("slow", "stage", "change"),
    [
        ({"wait_queue_s": 4.0}, "generation", "one more generator (generation.replicas: 3)"),
        ({"wait_generation_s": 4.0}, "generation", "the learner waits 4 s of a step for the last answer alone"),
        ({"wait_reward_s": 4.0, "wait_reward_by_judge_s": 4.0}, "reward", "a faster judge"),
        ({"hold_s": 4.0}, "evaluation", "fewer evaluations (evaluation.every above"),
    ],
)
def test_the_slow_stage_bounds_the_run(slow: dict[str, float], stage: str, change: str, max_lag: int) -> None:
    found = verdict([QUICK | slow] * 3, config_with(max_lag), num_generators=2)
    assert found is not None
    assert found.stage == stage
    assert re.search(r" 4(\.1)? s of 4\.[34] s \(9\d%\)", found.because), found.because
    # Without a lag, an overlap would save something too, and comes first.
    assert found.change[0].startswith(change) or change in " ".join(found.change)


@pytest.mark.parametrize(
    ("slow", "stage", "change"),
    [
        (
            {"train_s": 4.0},
            "training",
            "a faster learner: learner.dtype: bfloat16 where the processor has it, learner.ranks above 1, or a GPU",
        ),
        ({"wait_push_s": 4.0}, "push", "a faster network"),
        ({"shift_s": 4.0}, "shift", "larger steps (algorithm.rollout_batch_size above"),
        ({"checkpoint_s": 4.0}, "checkpoint", "run.checkpoint_every: 100 instead of 50: about 2 s of 4"),
        ({"record_s": 4.0}, "log", "a faster disk"),
    ],
)
def test_a_slow_learner_bounds_the_run(slow: dict[str, float], stage: str, change: str) -> None:
    found = verdict([QUICK | slow], config_with(1), num_generators=2)
    assert found is not None
    assert (found.stage, found.change[0].startswith(change)) == (stage, True), found.change


def test_the_larger_share_is_named_and_the_wait_beside_it_is_shortened_first() -> None:
    step = {"wait_queue_s": 2.0, "train_s": 3.0}
    overlapping = verdict([step], config_with(1), num_generators=1)
    assert overlapping is not None
    # The larger share is named. Changes that shorten the wait come before a faster learner.
    assert overlapping.because == (
        "training takes 3 s of 5 s (60%) of a step; of the rest, the learner waits 2 s (40%) for generation"
    )
    assert overlapping.change[-1].startswith("then a faster learner: ")
    # Two of five seconds are waited; with one more of one generator a step lasts as long as training.
    assert "up to about 2 s of 5 s a step less" in overlapping.change[0]
    taking_turns = verdict([step], config_with(0), num_generators=1)
    assert taking_turns is not None
    assert taking_turns.stage == "training"
    # The shorter of the two disappears behind the longer.
    assert taking_turns.change[0] == (
        "staleness.max_lag: 1 instead of 0, so that generation and training overlap: about 2 s of 5 s a step less"
    )


def test_without_a_lag_each_saving_is_what_the_times_allow() -> None:
    found = verdict([{"wait_queue_s": 4.0, "train_s": 1.0}], config_with(0), num_generators=1)
    assert found is not None
    assert found.stage == "generation"
    lag, one_more, _ = found.change
    # Only training can disappear behind generation; a second generator halves the wait.
    assert lag.endswith("overlap: about 1 s of 5 s a step less")
    assert one_more.startswith("one more generator (generation.replicas: 2)")
    assert one_more.endswith("up to about 2 s of 5 s a step less")


def test_a_small_wait_does_not_bound_a_run_whose_stages_overlap() -> None:
    found = verdict([{"wait_queue_s": 0.3, "train_s": 9.7}], config_with(1), num_generators=1)
    assert found is not None
    assert found.stage == "training"


def test_only_the_last_steps_are_looked_at_and_without_any_there_is_no_verdict() -> None:
    found = verdict([{"checkpoint_s": 100.0}] + [QUICK | {"train_s": 4.0}] * 5, config_with(1), num_generators=1)
    assert found is not None
    assert (found.stage, found.steps) == ("training", 5)
    assert found.seconds == pytest.approx(4.35)
    assert verdict([], config_with(1), num_generators=1) is None


def test_a_run_of_agents_is_advised_on_workers_and_cores_not_generators() -> None:
    config = config_with(1, agent={"path": "agent.py", "workers": 8}, gateway={"replicas": 1})
    step = QUICK | {"wait_queue_s": 9.0, "wait_generation_s": 1.0, "rollouts_at_once": 7.9}
    found = verdict([step], config, num_generators=1)
    assert found is not None
    assert found.stage == "agents"
    assert found.because.endswith(
        "for agents, 9 s of it until a worker is free: 7.9 rollouts are played at a time with agent.workers 8"
    )
    assert found.change[0].startswith("agent.workers above 8, as long as the machine has idle cores")
    assert found.change[1].startswith("cores for the agents")
    assert "generation.replicas" not in " ".join(found.change)
    slow_agents = verdict(
        [QUICK | {"wait_generation_s": 9.0}], config_with(1, agent={"external": True}, gateway={"replicas": 1}), 1
    )
    assert slow_agents is not None
    assert slow_agents.change[0].startswith("cores for the agents")
    assert slow_agents.change[1].startswith("more workers of yours at the gateway")


def test_a_shorter_limit_is_no_advice_for_answers_far_below_it() -> None:
    config = config_with(0, algorithm={"response_length": 8})
    step = QUICK | {"wait_generation_s": 9.0, "truncated_share": 0.0}
    for tokens, advised in ((2.6, False), (6.0, True)):
        found = verdict([step | {"response_tokens_mean": tokens}], config, num_generators=1)
        assert found is not None
        assert ("a shorter algorithm.response_length" in " ".join(found.change)) is advised
