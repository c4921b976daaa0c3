"""Steps whose figures are computed again from their log: every preset, with rows that a figure must not count.

Mini-batch 0 holds groups with equal rewards alone, so nothing in it has a gradient; mini-batch 1 has one rollout with
an advantage, so of two ranks one has no work.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gspo.common.config.schema import Config
from gspo.learner.assembly.rows import Row
from gspo.learner.storage.step_log import StepLog
from gspo.learner.training.trainer import Trainer
from tests.support.tiny_model import make_tiny_model
from tests.support.training.numpy_reference import normalized
from tests.support.training.rollout_rows import make_config, make_rows, train

STEP = 3
CASES: dict[str, dict[str, Any]] = {
    "gspo": {},
    "roll-gspo": {"preset": "roll-gspo", "prompt_length": 64, "response_length": 64},
    "length": {"pg_clip_low": 0.002, "pg_clip_high": 0.003, "pg_clip_reference_length": 30},
    "branch": {"ratio_of": "branch", "pg_clip_low": 0.002, "pg_clip_high": 0.003, "pg_clip_reference_length": 30},
    "turns": {"loss_agg_mode": "seq-mean-token-sum-turn-norm"},
    "grpo": {"preset": "grpo"},
    "cispo": {"objective": "cispo", "importance_sampling": "token", "pg_clip": 0.002},
    "dppo": {"objective": "dppo_tv", "importance_sampling": "token", "pg_clip": 1e-4},
    "entropy": {"entropy_coef": 0.05, "loss_agg_mode": "token-mean"},
    "teacher": {"importance_sampling": "seq_token", "pg_clip": 0.1},
    "teacher_alone": {},
    "mask": {"old_logprobs": "recompute", "behavior_correction": "mask", "behavior_low": 0.99, "behavior_high": 1.01},
}
# Their keys need rollouts of several branches or turns.
OF_AGENTS = ("branch", "turns")
# Their step looks at all sequences before the first update and after the last one.
SPLIT = ("gspo", "length", "branch", "mask", "teacher")
# Sections `teacher`, without the path.
TEACHERS: dict[str, dict[str, Any]] = {
    "teacher": {"coef": 0.3},
    "teacher_alone": {"kl_in": "loss", "coef": 0.3, "alone": True},
}
LEARNER = {"learning_rate": 1e-4, "warmup_steps": 3, "weight_decay": 0.1}
_EQUAL = (0, 1, 2)
TEACHER = "teacher"


def make_figure_models(folder: Path) -> Path:
    """Write the policy of the cases to `folder`, with its teacher beneath it, and return it."""
    make_tiny_model(folder / TEACHER, layers=1, seed=1, scale=4.0)
    return make_tiny_model(folder, scale=4.0)


def figure_config(model: Path, case: str, **learner: Any) -> Config:
    """The configuration of a case; `learner` adds keys of that section."""
    keys: dict[str, Any] = {"algorithm": CASES[case], "learner": {**LEARNER, **learner}}
    if case in SPLIT:
        keys["learner"] |= {"clip_split_every": STEP}
    if case in OF_AGENTS:
        keys |= {"agent": {"external": True}, "gateway": {"replicas": 1}}
    if case in TEACHERS:
        keys["teacher"] = {"path": str(model / TEACHER), **TEACHERS[case]}
    return make_config(model, **keys)


def train_case(model: Path, case: str, out: Path, **learner: Any) -> dict[str, float]:
    """Train a case's step on this rank; its figures. The first rank leaves the log and the figures in `out`."""
    config = figure_config(model, case, **learner)
    trainer = Trainer(config, model)
    rows = figure_rows(model, config)
    figures = train(trainer, STEP, rows).metrics
    if trainer.engine.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        StepLog(out).write(STEP, rows)
        (out / "figures.json").write_text(json.dumps(figures))
    return figures


def figure_rows(model: Path, config: Config) -> list[Row]:
    """Eight groups of four, with tokens of two versions, skipped rollouts, conversations and parts of the reward."""
    rows = sorted(make_rows(model, step=STEP, num_groups=8, noise=0.01), key=lambda row: (row.group, row.number))
    rows = [_scored(_older(row)) for row in rows]
    advantage = {
        (row.group, row.number): value
        for group in range(8)
        if (counted := [row for row in rows if row.group == group and row.skipped is None])
        for row, value in zip(counted, _advantages(counted, config), strict=True)
    }
    rows = [replace(row, advantage=advantage.get((row.group, row.number))) for row in rows]
    order = np.random.default_rng(0).permutation(len(rows))
    return [_in_a_mini_batch(rows[place]) for place in order]


def _older(row: Row) -> Row:
    """Every fifth answer began a version earlier; of every seventh that token is too old to count."""
    index = row.group * 4 + row.number
    version, mask = row.version.copy(), row.mask.copy()
    if index % 5 == 0:
        version[:2] = STEP - 2
    if index % 7 == 0 and len(mask) > 1:
        mask[0] = False
    return replace(row, version=version, mask=mask, logp=np.where(mask, row.logp, 0).astype(np.float32))


def _scored(row: Row) -> Row:
    reward = 1.0 if row.group in _EQUAL else float(row.number % 2 + 0.5 * (row.group % 3))
    parts = [
        {"name": name, "value": share * reward, "weight": 1.0} for name, share in (("right", 0.75), ("form", 0.25))
    ]
    row = replace(row, reward=reward, parts_json=json.dumps(parts))
    if row.group == 5:
        turns: dict[str, Any] = {"turns_json": "[1]", "num_turns": 2 + row.number, "num_tool_calls": row.number}
        outcome = "environment_done" if row.number < 2 else "turn_limit"
        return replace(row, **turns, num_malformed_calls=1, num_cut_turns=row.number % 2, outcome=outcome)
    if (row.group, row.number) == (6, 1):
        return replace(row, skipped="failed", reward=None, failure="it raised")
    if (row.group, row.number) == (7, 2):
        return replace(row, skipped="truncated", outcome="truncated")
    if (row.group, row.number) == (7, 3):
        return replace(row, skipped="stale")
    return row


def _advantages(rows: list[Row], config: Config) -> list[float]:
    algorithm = config.algorithm
    if config.teacher.alone:
        return [0.0] * len(rows)
    norm = "group" if algorithm.adv_estimator == "grpo" else algorithm.reward_norm
    rewards, groups = [row.reward for row in rows if row.reward is not None], [row.group for row in rows]
    values = normalized(rewards, groups, norm, False, False, algorithm.reward_clip)
    return [float(value) for value in values]


def _in_a_mini_batch(row: Row) -> Row:
    if row.skipped is not None:
        return row
    if row.group < 2:
        return replace(row, mini_batch=0)
    if row.group == 2 or (row.group, row.number) == (3, 0):
        return replace(row, mini_batch=1)
    return replace(row, mini_batch=2 + row.group % 2)
