"""The same training step twice: whether this device gives the same bits, and which tensors differ if it does not.

With torch's deterministic algorithms too, and the kernels that have none.
"""

from __future__ import annotations

import gc
import os
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gspo.learner.assembly.rows import Row
from gspo.learner.training.trainer import Trainer
from tests.gpu.learner_calls import learner_config, random_rows
from tests.gpu.part_run import PartRun
from tests.support.training.rollout_rows import train, with_version

_NUM_STEPS = 2
_FIRST = 5
# The begin of a refusal or a warning of torch: "put_ does not have a deterministic implementation, but ...".
_NO_SUCH_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")


def run(case: PartRun) -> None:
    """Train two steps from the same weights, twice as a run does and twice with torch's deterministic algorithms."""
    sizes = case.sizes
    rows = random_rows(16, sizes.prompt_tokens, sizes.answer_tokens)
    _compare(case, rows, "as_by_default")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's deterministic products ask for it
    refused = refused_kernels(lambda: _compare(case, rows, "deterministic"))
    case.note(kernels_not_deterministic=", ".join(refused) or "none")
    case.judge("share of equal tensors", float(case.numbers["as_by_default_equal_tensors"]), at_least=1)


def refused_kernels(work: Callable[[], None]) -> list[str]:
    """Do some work with deterministic kernels, and where one has no such form with its own; the names of these."""
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                work()
            except RuntimeError as error:
                if not _NO_SUCH_KERNEL.search(str(error)):
                    raise
                # FlashAttention is deterministic only where torch refuses other kernels. So this comes second.
                torch.use_deterministic_algorithms(True, warn_only=True)
                work()
    finally:
        torch.use_deterministic_algorithms(False)
    matches = (_NO_SUCH_KERNEL.search(str(it.message)) for it in caught)
    return sorted({match[1] for match in matches if match})


def _compare(case: PartRun, rows: list[Row], name: str) -> None:
    first, again = _policy(case, rows), _policy(case, rows)
    other = [key for key, tensor in first.items() if not torch.equal(tensor, again[key])]
    case.note(**{f"{name}_equal_tensors": 1 - len(other) / len(first)})
    if other:
        case.note(**{f"{name}_first_to_differ": ", ".join(other[:_FIRST])})


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
