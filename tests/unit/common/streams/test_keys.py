"""Names in Redis: one hash slot a run, none shared between runs, and a reader for every stream."""

from __future__ import annotations

from redis.crc import key_slot

from gspo.common.streams.keys import HEARTBEAT_S, INSTANCE_TTL_S, Keys, consumer_groups, rollout_key

NAMES = ("prompts", "paused_prompts", "rollouts", "scored", "eval_prompts", "eval_rollouts", "eval_scored")
OTHERS = ("dead", "events", "partial", "open", "redis_epoch", "instances", "paused")


def all_keys(run: str) -> list[str]:
    keys = Keys(run)
    return [getattr(keys, name) for name in (*NAMES, *OTHERS)] + [keys.instance("generation", "5f0c")]


def test_a_key_is_gspo_run_and_name() -> None:
    assert Keys("math").prompts == "gspo:{math}:prompts"
    assert Keys("math").instance("reward", "5f0c") == "gspo:{math}:instance:reward:5f0c"


def test_all_keys_of_a_run_are_in_one_slot_of_a_cluster() -> None:
    """A script or transaction over two of them works on a Redis Cluster only then."""
    assert len({key_slot(key.encode()) for key in all_keys("math")}) == 1


def test_no_two_names_are_one_key_and_no_two_runs_share_one() -> None:
    assert len(set(all_keys("math"))) == len(NAMES) + len(OTHERS) + 1
    assert not set(all_keys("math")) & set(all_keys("math2"))


def test_every_stream_of_work_has_one_reader() -> None:
    keys = Keys("math")
    assert consumer_groups(keys) == {
        keys.prompts: "generation",
        keys.paused_prompts: "generation",
        keys.eval_prompts: "generation",
        keys.rollouts: "reward",
        keys.eval_rollouts: "reward",
        keys.scored: "learner",
        keys.eval_scored: "coordinator",
    }


def test_a_member_outlives_three_lost_beats() -> None:
    assert INSTANCE_TTL_S > 3 * HEARTBEAT_S


def test_rollout_keys_of_other_groups_and_evaluations_differ() -> None:
    assert rollout_key(12, 3) == "12-3"
    assert rollout_key(1, 23) != rollout_key(12, 3)
    assert rollout_key(7, 0, "v20") == "v20:7-0"
