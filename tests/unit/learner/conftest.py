"""Scored rollouts written out by hand, for every test of assembly and log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout, Score, ScoredRollout, ScorePart

MakeScored = Callable[..., ScoredRollout]


@pytest.fixture(scope="session")
def scored() -> MakeScored:
    """Makes a scored rollout of a few tokens, all the policy's unless `mask` says otherwise."""
    return _scored


def _scored(
    group: int = 0,
    number: int = 0,
    *,
    version: Sequence[int] = (0, 0),
    reward: float | None = 1.0,
    failure: str = "reward raised ValueError",
    num_rollouts: int = 2,
    **fields: Any,
) -> ScoredRollout:
    policy = [v >= 0 for v in version]
    rollout = Rollout(
        schema=1,
        group=group,
        number=number,
        attempt=fields.pop("attempt", 1),
        num_rollouts=num_rollouts,
        prompt=Prompt(token_ids=[5, 6, 7], text="1+1=", columns_json='{"answer": 2}'),
        token_ids=fields.pop("token_ids", [10 + t for t in range(len(version))]),
        logp=fields.pop("logp", [-0.1 * (t + 1) if counts else 0.0 for t, counts in enumerate(policy)]),
        version=version,
        mask=fields.pop("mask", bytes(policy)),
        text=fields.pop("text", "2"),
        outcome=fields.pop("outcome", OUTCOME_EOS),
        generator="generation-a",
        issued_unix_s=100.0,
        started_unix_s=101.0,
        finished_unix_s=102.5,
        temperature=0.7,
        **fields,
    )
    score = Score(version="abc", scorer="reward-a", scored_unix_s=103.0)
    if reward is None:
        score.failure = failure
    else:
        score.reward = reward
        score.parts.append(ScorePart(name="exact", value=reward, weight=1.0, version="abc"))
    return ScoredRollout(rollout=rollout, score=score)
