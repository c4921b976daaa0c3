"""The section `teacher`: contradictions, and sections that may be absent beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.common.config.loading import check_resume, parse_config, read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError

REWARD = {"functions": [{"path": "reward.py"}]}
ALONE = {"path": "larger", "alone": True}


def parsed(teacher: dict[str, Any], reward: dict[str, Any] | None = None, **sections: Any) -> Config:
    keys = {"name": "test", "model": {"path": "m"}, "data": {"prompts": "p.jsonl"}, "run": {"total_steps": 1}}
    return parse_config({**keys, "teacher": teacher, "reward": reward or {}, **sections}, base=Path("/base"))


def refused(*args: Any, **sections: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        parsed(*args, **sections)
    return caught.value


SERVER = {"address": "http://teacher:8000", "model": "larger"}


@pytest.mark.parametrize(
    ("teacher", "where", "rule"),
    [
        ({"address": "http://teacher:8000"}, "teacher.model", "a server that serves another model must not teach"),
        ({**SERVER, "address": "teacher:8000"}, "teacher.address", "is not allowed"),
        ({**SERVER, "address": "http://me:secret@teacher"}, "teacher.address", "holds a password"),
    ],
    ids=str,
)
def test_a_teacher_is_a_folder_or_a_server_with_a_name(teacher: dict[str, Any], where: str, rule: str) -> None:
    error = refused(teacher, REWARD)
    assert error.where == where and rule in error.rule
    assert "secret" not in str(error)


def test_a_server_teaches_at_temperature_1_alone() -> None:
    error = refused(SERVER, REWARD, sampling={"temperature": 0.7})
    assert error.where == "sampling.temperature" and "at temperature 1 alone" in error.rule
    assert "teacher.path" in error.fix
    assert parsed(SERVER, REWARD).teacher.used
    assert parsed({"path": "larger"}, REWARD, sampling={"temperature": 0.7}).sampling.temperature == 0.7


def test_its_address_may_change_when_a_run_is_resumed_and_its_model_may_not() -> None:
    before = parsed(SERVER, REWARD)
    check_resume(before, parsed({**SERVER, "address": "http://other:8000", "timeout_s": 60.0}, REWARD))
    with pytest.raises(InputError, match=r"teacher\.model"):
        check_resume(before, parsed({**SERVER, "model": "another"}, REWARD))


def test_rewards_may_be_absent_beside_a_teacher_alone() -> None:
    assert not parsed(ALONE).reward.functions
    error = refused({"path": "larger"})
    assert error.where == "reward.functions" and "teacher.alone: true" in error.fix
    # An evaluation measures rewards.
    assert refused(ALONE, evaluation={"prompts": "e.jsonl"}).where == "reward.functions"
    assert parsed(ALONE, REWARD, evaluation={"prompts": "e.jsonl"}).teacher.alone


def test_keys_of_a_preset_are_accepted_beside_a_teacher_alone() -> None:
    for preset in ("roll-gspo", "dr-grpo"):
        parsed(ALONE, REWARD, algorithm={"preset": preset})
        parsed({**ALONE, "kl_in": "loss"}, REWARD, algorithm={"preset": preset})


def test_a_kl_in_the_rewards_is_an_advantage() -> None:
    loss, clip = {**ALONE, "kl_in": "loss"}, {"pg_clip": 0.1}
    error = refused(loss, algorithm=clip)
    assert error.where == "algorithm.pg_clip" and "every advantage is 0" in error.rule
    parsed(ALONE, algorithm=clip)
    parsed(loss, algorithm={**clip, "add_token_level_kl": True})


@pytest.mark.parametrize("needs", [{"gamma": 0.9}, {"num_return_sequences_in_group": 1}])
def test_a_teacher_alone_has_the_estimator_that_a_discount_or_a_single_rollout_needs(needs: dict[str, Any]) -> None:
    assert parsed(ALONE, algorithm={"adv_estimator": "reinforce", **needs}).teacher.alone


RECOMPUTE = {"old_logprobs": "recompute"}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({**RECOMPUTE, "behavior_correction": "truncate"}, "behavior_correction: truncate"),
        ({"behavior_correction": "mask"}, "behavior_correction: mask"),
        (RECOMPUTE, "old_logprobs: recompute"),
        ({**RECOMPUTE, "loss": {"path": "l.py"}, "behavior_correction": "truncate"}, "behavior_correction: truncate"),
        ({"loss": {"path": "l.py"}, "behavior_correction": "mask"}, "behavior_correction: mask"),
    ],
    ids=str,
)
def test_old_log_probs_without_an_advantage_have_no_effect(keys: dict[str, Any], named: str) -> None:
    loss = {**ALONE, "kl_in": "loss"}
    assert str(refused(loss, algorithm=keys)).startswith(f"algorithm.{named} has no effect")
    parsed(ALONE, algorithm=keys)
    parsed(loss, algorithm={**keys, "add_token_level_kl": True})


@pytest.mark.parametrize(
    "keys",
    [
        # Takes tokens out of the teacher's loss too.
        {**RECOMPUTE, "behavior_correction": "mask"},
        # Experts are those of the pass that makes the old log-probs.
        {**RECOMPUTE, "routing_replay": "learner"},
        # A loss of one's own has them as an input, and may have a gradient without an advantage.
        {**RECOMPUTE, "loss": {"path": "l.py"}},
        {"loss": {"path": "l.py"}},
    ],
    ids=str,
)
def test_old_log_probs_that_another_part_uses_are_accepted(keys: dict[str, Any]) -> None:
    assert parsed({**ALONE, "kl_in": "loss"}, algorithm=keys).teacher.trains_by_loss_alone


def test_branches_share_no_ratio_where_every_advantage_is_0() -> None:
    agents: dict[str, Any] = {"agent": {"external": True}, "gateway": {"replicas": 1}}
    error = refused({**ALONE, "kl_in": "loss"}, REWARD, algorithm={"ratio_of": "branch"}, **agents)
    assert error.where == "algorithm.ratio_of" and "every advantage is 0" in error.rule
    parsed(ALONE, REWARD, algorithm={"ratio_of": "branch"}, **agents)


def test_the_example_is_a_configuration() -> None:
    config = read_config(Path(__file__).parents[4] / "examples/arithmetic/distill.yaml")
    assert config.teacher.alone and config.reward.functions


def test_a_folder_beside_the_file_is_meant(tmp_path: Path) -> None:
    (tmp_path / "larger").mkdir()
    keys = {"name": "t", "model": {"path": "m"}, "data": {"prompts": "p"}, "run": {"total_steps": 1}, "teacher": ALONE}
    assert parse_config(keys, base=tmp_path).teacher.path == str(tmp_path / "larger")
