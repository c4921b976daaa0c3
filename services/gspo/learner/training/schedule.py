"""The hyperparameters of a step: pure functions of the step number, so that a resumed run needs no scheduler state.

Not an optimizer.
"""

from __future__ import annotations

import math

from gspo.common.config.learner import LearnerConfig
from gspo.common.config.schema import Config
from gspo.learner.training.trainer_api import Hyperparameters


def configured_hyperparameters(config: Config, step: int) -> Hyperparameters:
    """What the configuration trains `step` (from 1) with."""
    learner = config.learner
    rate = learning_rate(learner, step, config.run.total_steps)
    return Hyperparameters(rate, learner.weight_decay, learner.max_grad_norm)


def learning_rate(learner: LearnerConfig, step: int, total_steps: int | None) -> float:
    """The rate of `step` (from 1): a linear rise over warmup_steps, then constant, or a fall that ends after the last.

        warm-up    peak * step / (warmup_steps + 1)
        linear     peak * (1 - p)
        cosine     peak * (1 + cos(pi p)) / 2,     p = (step - 1 - warmup_steps) / (total_steps - warmup_steps)

    p stays in [0, 1), so that the last step still moves; a run that goes on beyond total_steps keeps its last rate.
    ValueError: linear or cosine without total_steps.
    """
    warmup = learner.warmup_steps
    if step <= warmup:
        return learner.learning_rate * step / (warmup + 1)
    if learner.schedule == "constant":
        return learner.learning_rate
    if total_steps is None:
        raise ValueError(f"learner.schedule {learner.schedule} needs run.total_steps")
    length = max(1, total_steps - warmup)
    progress = min(step - 1 - warmup, length - 1) / length
    if learner.schedule == "linear":
        return learner.learning_rate * (1 - progress)
    return learner.learning_rate * (1 + math.cos(math.pi * progress)) / 2
