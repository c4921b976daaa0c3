"""A rollout beyond the limits of its run is refused with the limit; every other one passes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo.learner.assembly.rollout_limits import RolloutLimits, rollout_limits
from gspo_proto.rollout_pb2 import ScoredRollout
from tests.support.service_process import make_run
from tests.unit.learner.conftest import MakeScored

LIMITS = RolloutLimits(num_rollouts=2, prompt_length=3, response_length=2, rollout_length=9, vocabulary=20)


def changed(good: ScoredRollout, **fields: Any) -> ScoredRollout:
    """The rollout with other values in some fields; `prompt` is its token ids."""
    good.rollout.prompt.token_ids[:] = fields.pop("prompt", [5, 6, 19])
    for name in set(fields) & {"token_ids", "logp", "branch_starts"}:
        getattr(good.rollout, name)[:] = fields.pop(name)
    for name, value in fields.items():
        setattr(good.rollout, name, value)
    return good


def test_a_rollout_at_every_limit_passes(scored: MakeScored) -> None:
    LIMITS.check(changed(scored(), number=1, token_ids=[0, 19], logp=[0.0, -1e9]))
    LIMITS.check(changed(scored(version=[]), prompt=[]))  # it failed before it began
    # A prompt of two tokens, an answer of two, and a branch of four tokens after a context of one.
    LIMITS.check(changed(scored(version=[0, 0, -1, 0, 0, 0, 0]), prompt=[5, 6], branch_starts=[2]))


SETS = {"token_ids": [4, 19], "kept_sizes": [2, 3], "kept_ids": [4, 5, 0, 19, 7]}


def test_sets_that_fit_their_tokens_pass(scored: MakeScored) -> None:
    limits = replace(LIMITS, keeps_sets=True)
    limits.check(scored(**SETS))
    limits.check(scored(**{**SETS, "kept_sizes": [2, 0], "kept_ids": [4, 5]}))
    limits.check(changed(scored(version=[]), prompt=[]))  # it failed before it began


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"kept_sizes": [2], "kept_ids": [4, 5]}, "the sizes of 1 sets for 2 tokens"),
        ({"kept_sizes": [2, 2]}, "sets of 4 tokens together, and 5 ids"),
        ({"kept_sizes": [], "kept_ids": []}, "it lacks the tokens that each was sampled from"),
        ({"kept_sizes": [2, 81], "kept_ids": [4] * 83}, "a set of 81 tokens, and one has at most 80"),
        ({"kept_ids": [4, 5, 0, 19, 20]}, "token 20 in a set, and the model's vocabulary has 20"),
        ({"kept_ids": [4, 5, 19, 19, 7]}, "a token is twice in a set"),
        ({"kept_ids": [4, 5, 0, 18, 7]}, "1 tokens are not in the sets that they were sampled from"),
    ],
)
def test_sets_that_do_not_fit_are_refused(scored: MakeScored, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(LIMITS, keeps_sets=True).check(scored(**SETS | fields))


def test_sets_in_a_run_without_top_k_are_refused(scored: MakeScored) -> None:
    with pytest.raises(ValueError, match=r"it has the tokens .* unlike rollouts of this run \(sampling\.top_k\)"):
        LIMITS.check(scored(**SETS))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_rollouts": 3}, "number 0 of 3, and a group of this run has 2"),
        ({"number": 2}, "number 2 of 2, and a group"),
        ({"prompt": []}, "its prompt has no token"),
        ({"prompt": [1, 1, 1, 1]}, "its prompt has 4 tokens, and one of this run has at most 3"),
        ({"token_ids": [1, 1, 1]}, "its answer has 3 tokens, and one of this run has at most 2"),
        ({"prompt": [20]}, "token 20 in its prompt, and the model's vocabulary has 20"),
        ({"token_ids": [1, 2**32 - 1]}, "token 4294967295 in its answer"),
        ({"logp": [-1.0, 0.02]}, "0.02 cannot be a behavior log-prob"),
        ({"logp": [math.nan, -1.0]}, "nan cannot be a behavior log-prob"),
        ({"logp": [-math.inf, -1.0]}, "-inf cannot be a behavior log-prob"),
        ({"num_turns": 2**31}, "a count of 2147483648, and the log holds none above 2147483647"),
        ({"issued_unix_s": math.nan}, "a time or a temperature that is not a finite number"),
        ({"temperature": math.inf}, "a time or a temperature"),
    ],
)
def test_what_cannot_be_is_refused(scored: MakeScored, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=r"rollout 0-[02]: ") as refused:
        LIMITS.check(changed(scored(), **fields))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("version", "starts", "problem"),
    [
        ([0, -1, 0], [0], "branch_starts [0] do not ascend within its 3 tokens"),
        ([0, -1, 0], [3], "branch_starts [3] do not ascend within its 3 tokens"),
        ([0, -1, 0], [2**32 - 1], "branch_starts [4294967295] do not ascend"),
        ([0, -1, -1, 0], [2, 2], "branch_starts [2, 2] do not ascend"),
        ([0, -1, -1, 0], [2, 1], "branch_starts [2, 1] do not ascend"),
        ([0, -1, 0, 0], [1, 2], "its branch at token 2 begins without a context"),
        ([0, 0, 0, -1, 0], [3], "its answer has 3 tokens, and one of this run has at most 2"),
        ([0, -1, 0, 0, 0, 0, 0], [1], "a branch of 6 tokens, and one of this run has at most 5"),
        ([0, -1, 0, 0, -1, 0, 0], [1, 4], "its branches have 10 tokens, and those of a rollout at most 9 in this run"),
        ([-1] * 16, [], "its answer has 16 tokens, and one of this run has at most 2"),
    ],
)
def test_branches_that_cannot_be_are_refused(
    scored: MakeScored, version: list[int], starts: list[int], problem: str
) -> None:
    with pytest.raises(ValueError, match=r"rollout 0-0: ") as refused:
        LIMITS.check(changed(scored(version=version), branch_starts=starts))
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("logp", "problem"),
    [
        ([-1.0], "1 log-probs of the teacher for 2 tokens"),
        ([], "0 log-probs of the teacher for 2 tokens"),
        ([-1.0, 0.5], "0.5 cannot be a teacher's log-prob"),
        ([-1.0, math.nan], "nan cannot be a teacher's log-prob"),
    ],
)
def test_a_taught_rollout_has_a_log_prob_of_every_token(scored: MakeScored, logp: list[float], problem: str) -> None:
    taught, rollout = replace(LIMITS, is_taught=True), scored()
    rollout.score.teacher_logp[:] = logp
    with pytest.raises(ValueError, match=r"rollout 0-0: ") as refused:
        taught.check(rollout)
    assert problem in str(refused.value)
    # One that failed may have none.
    taught.check(scored(reward=None))
    rollout.score.teacher_logp[:] = [-1.0, -2.0]
    taught.check(rollout)


@pytest.mark.parametrize(
    "config", ['{"model_type": "x", "vocab_size": 20}', '{"model_type": "x", "text_config": {"vocab_size": 20}}']
)
def test_the_limits_are_those_of_the_run_and_its_model(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert rollout_limits(make_run(tmp_path, tmp_path)) == RolloutLimits(4, 64, 64, 128, 20)
    teacher = {"address": "http://teacher:8000", "model": "larger"}
    assert rollout_limits(make_run(tmp_path, tmp_path, teacher=teacher)).is_taught
