"""The same training step twice: whether this device gives the same bits, and which tensors differ if it does not."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from gspo.learner.assembly.rows import Row
from gspo.learner.training.trainer import Trainer
from tests.gpu.learner_calls import learner_config, random_rows
from tests.gpu.part_run import PartRun
from tests.support.training.rollout_rows import train, with_version

_NUM_STEPS = 2
_FIRST = 5


def run(case: PartRun) -> None:
    """Train two steps from the same weights, twice as a run does and twice with torch's deterministic algorithms."""
    sizes = case.sizes
    rows = random_rows(16, sizes.prompt_tokens, sizes.answer_tokens)
    for name, deterministic in (("as_by_default", False), ("deterministic", True)):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        first, again = _policy(case, rows), _policy(case, rows)
        torch.use_deterministic_algorithms(False)
        other = [key for key, tensor in first.items() if not torch.equal(tensor, again[key])]
        case.note(**{f"{name}_equal_tensors": 1 - len(other) / len(first)})
        if other:
            case.note(**{f"{name}_first_to_differ": ", ".join(other[:_FIRST])})
    case.judge("share of equal tensors", float(case.numbers["as_by_default_equal_tensors"]), at_least=1)


def _policy(case: PartRun, rows: list[Row]) -> Mapping[str, torch.Tensor]:
    """The policy after the steps."""
    learner: dict[str, Any] = {"learning_rate": 1e-4, "torch_compile": case.on_gpu, "gradient_checkpointing": False}
    trainer = Trainer(learner_config(case, case.model, "bfloat16", **learner), case.model)
    for step in range(1, 1 + _NUM_STEPS):
        train(trainer, step, with_version(rows, step - 1))
    policy = {name: tensor.clone() for name, tensor in trainer.engine.policy().items()}
    del trainer
    gc.collect()
    return policy
