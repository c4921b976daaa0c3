"""Rollouts and reward files for tests.

What it is not: a scorer; the real one reads the files that are written here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gspo.common.config.reward import RewardConfig
from gspo.common.streams.entries import SCHEMA
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout, Score


def make_rollout(text: str, *, group: int = 0, number: int = 0, **columns: Any) -> Rollout:
    """A rollout of the problem 2+2 with the given answer and data set columns."""
    return Rollout(
        schema=SCHEMA,
        group=group,
        number=number,
        attempt=1,
        num_rollouts=8,
        prompt=Prompt(token_ids=[5, 6], text="2+2=", columns_json=json.dumps(columns)),
        token_ids=[1, 2],
        logp=[-0.5, -0.25],
        version=[0, 0],
        mask=b"\1\1",
        text=text,
        outcome=OUTCOME_EOS,
    )


def reward_config(folder: Path, source: str, **reward: Any) -> RewardConfig:
    """The `reward` section for one file `r.py` with the given source."""
    (folder / "r.py").write_text(source)
    return RewardConfig.model_validate({"functions": [{"path": folder / "r.py"}], "timeout_s": 10.0, **reward})


def reward_or_failure(score: Score) -> float | str:
    """The reward, or the reason for there being none."""
    return score.failure if score.WhichOneof("result") == "failure" else score.reward
