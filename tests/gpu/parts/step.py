"""Training steps of the learner on random rollouts, and the copy of the policy that a push sends."""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from gspo.generation.engine.api import Completion
from gspo.learner.push.policy_weights import weights_from
from gspo.learner.training.trainer import Trainer
from tests.gpu.learner_calls import learner_config, rows_of
from tests.gpu.part_run import PartRun
from tests.support.training.rollout_rows import train, with_version

_GIB = 1 << 30


def run(case: PartRun) -> None:
    """One step to warm up, then timed ones; then the weights as the publisher takes them."""
    sizes = case.sizes
    rng = np.random.default_rng(0)
    length = sizes.prompt_tokens + sizes.answer_tokens
    tokens = rng.integers(3, 90, (sizes.num_rollouts, length)).tolist()
    # Log-probs of a flat distribution: the ratio is far from 1, and the work is the same.
    flat = [-math.log(90.0)] * sizes.answer_tokens
    answered = [Completion(line[sizes.prompt_tokens :], flat, [0] * sizes.answer_tokens, "length") for line in tokens]
    rows = rows_of([line[: sizes.prompt_tokens] for line in tokens], answered)
    began = time.monotonic()
    trainer = Trainer(learner_config(case, case.model, "bfloat16", learning_rate=1e-5), case.model)
    case.note(start_s=time.monotonic() - began)
    before = weights_from(0, trainer.policy()).digest
    train(trainer, 1, rows)
    seconds = []
    for step in range(2, 2 + sizes.num_timed_steps):
        began = time.monotonic()
        figures = train(trainer, step, with_version(rows, step - 1)).metrics
        _synchronize(case)
        seconds.append(time.monotonic() - began)
        case.require(math.isfinite(figures["loss"]) and figures["grad_norm"] > 0, f"step {step}: {figures}")
    case.note(step_ms=1000 * min(seconds), tokens_per_s=sizes.num_rollouts * length / min(seconds))
    if case.device == "cuda":
        case.note(peak_gib=torch.cuda.max_memory_allocated() / _GIB)
    began = time.monotonic()
    tensors = trainer.policy()
    case.note(copy_s=time.monotonic() - began)
    began = time.monotonic()
    policy = weights_from(1, tensors)
    case.note(digest_s=time.monotonic() - began, policy_gib=policy.num_bytes / _GIB)
    case.require(policy.digest != before, "the steps changed no weight")


def _synchronize(case: PartRun) -> None:
    if case.device == "cuda":
        torch.cuda.synchronize()
