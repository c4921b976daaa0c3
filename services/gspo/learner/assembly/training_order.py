"""The rows of a step in training order, with advantages: a pure function of rows, seed and step.

assembler.py chooses the rows. The result is in the step file, so a replay reads it and draws no random number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gspo.common.config.algorithm import AlgorithmConfig
from gspo.learner.assembly.rows import Row
from gspo_core.advantage import RunningMoments, normalize_rewards


def in_training_order(rows: Sequence[Row], *, seed: int, step: int, num_mini_batches: int) -> list[Row]:
    """The rows permuted by (seed, step) and cut into mini-batches; their order before has no effect.

    Sizes of mini-batches differ by one at most; with fewer rows than mini-batches each row is one. Skipped rows come
    last and are in no mini-batch.
    """
    rows = sorted(rows, key=lambda row: (row.group, row.number))
    trained = [row for row in rows if row.skipped is None]
    order = np.random.default_rng((seed, step)).permutation(len(trained))
    cuts = np.array_split(order, min(num_mini_batches, len(trained)) or 1)
    placed = [replace(trained[i], step=step, mini_batch=mini_batch) for mini_batch, cut in enumerate(cuts) for i in cut]
    return placed + [replace(row, step=step) for row in rows if row.skipped is not None]


def with_advantages(rows: Sequence[Row], algorithm: AlgorithmConfig, moments: RunningMoments) -> list[Row]:
    """The rows with their normalised rewards; under running, `moments` is updated in row order."""
    trained = [row for row in rows if row.skipped is None]
    advantages_B = normalize_rewards(
        _rewards(trained),
        torch.tensor([row.group for row in trained], dtype=torch.long),
        reward_norm=algorithm.reward_norm,
        reward_shift=algorithm.reward_shift,
        reward_scale=algorithm.reward_scale,
        reward_clip=algorithm.reward_clip,
        moments=moments if algorithm.reward_norm == "running" else None,
    )
    advantages = iter(advantages_B.tolist())
    return [replace(row, advantage=next(advantages)) if row.skipped is None else row for row in rows]


def update_moments(moments: RunningMoments, rows: Sequence[Row]) -> None:
    """Update the moments from a logged step, to the bit as `with_advantages` did under running."""
    moments.update(_rewards([row for row in rows if row.skipped is None]))


def _rewards(rows: Sequence[Row]) -> torch.Tensor:
    return torch.tensor([row.reward for row in rows], dtype=torch.float64)
