"""Changes by another version: old and new scores, rewards with other parts, and advantages that change sign."""

from __future__ import annotations

import json
from typing import Any

from gspo.view.log_trial import compared


def row(number: int, value: float | None, other: float = 0.0, group: int = 5) -> dict[str, Any]:
    parts = [{"name": "exact", "value": value, "weight": 2.0, "version": "ab"}] if value is not None else []
    parts += [{"name": "length", "value": other, "weight": 1.0, "version": ""}] if other else []
    reward = None if value is None else 2.0 * value + other
    return {"step": 1, "group": group, "number": number, "reward": reward, "parts_json": json.dumps(parts)}


def score(reward: float | None) -> dict[str, Any]:
    return {"reward": reward, "failure": None if reward is not None else "exact: raised ValueError"}


def test_scores_rewards_and_signs() -> None:
    rows = [row(0, 1.0, -0.5), row(1, 0.0), row(0, 0.5, group=6), row(1, 0.5, group=6)]
    first, second, third, fourth = compared(rows, [score(0.0), score(2.0), score(1.0), score(4.0)], "exact")
    assert (first.old, first.new, first.old_reward, first.new_reward) == (2.0, 0.0, 1.5, -0.5)
    assert (first.is_flipped, second.is_flipped) == (True, True)
    # Equal rewards had no side before.
    assert (third.is_flipped, fourth.is_flipped) == (False, False)


def test_failures_have_no_reward_and_flip_nothing() -> None:
    first, second, third = compared(
        [row(0, 1.0), row(1, None), row(2, None, -0.5)], [score(None), score(3.0), score(3.0)], "exact"
    )
    assert (first.new, first.new_reward, first.failure) == (None, None, "exact: raised ValueError")
    assert (second.old, second.new_reward) == (None, 3.0)
    assert third.new_reward is None, "the other parts of a failed rollout are not all known"
    assert not any(rollout.is_flipped for rollout in (first, second, third))


def test_an_answer_to_which_the_new_version_does_not_apply_keeps_its_other_scores() -> None:
    none = {"reward": None, "failure": None}
    scored, alone, never = compared(
        [row(0, 1.0, -0.5), row(1, 1.0), {**row(2, None, 3.0), "reward": 3.0}], [none] * 3, "exact"
    )
    assert (scored.old, scored.new, scored.new_reward, scored.failure) == (2.0, None, -0.5, "")
    assert (alone.old_reward, alone.new_reward) == (2.0, None), "no function scores it"
    assert (never.old, never.old_reward, never.new_reward) == (None, 3.0, 3.0)
