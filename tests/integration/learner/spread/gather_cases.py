"""One rank of two, for test_gathers.py: trains under ZeRO 3 with the gathers of a run, and with float32 gathers.

Called by torchrun as `-m tests.integration.learner.spread.gather_cases OUT NAME=MODEL...`; rank 0 writes into OUT what
both came to.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME
from deepspeed.runtime.zero import partition_parameters
from safetensors.torch import save_file
from torch import distributed

from gspo.learner.assembly.rows import Row
from gspo.learner.training.host_states import _storages
from gspo.learner.training.trainer import Trainer
from tests.integration.learner.rank_cases import gradient
from tests.support.training.rollout_rows import make_config, make_rows, train, with_version

# Case -> the model, learner keys, algorithm keys.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("tied", {"dtype": "float32"}, {}),
    "tied": ("tied", {}, {}),
    "untied": ("untied", {"gradient_checkpointing": True}, {"use_kl_loss": True}),
    "mixture": ("mixture", {}, {}),
    "adapters": ("tied", {"lora": {"rank": 4}, "learning_rate": 1e-2}, {"use_kl_loss": True}),
    "offload": ("tied", {"offload": "all"}, {}),
    # DeepSpeed leaves the smaller weights whole on every rank.
    "persistent": ("tied", {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 4096}}}, {}),
}


@contextmanager
def gathered_by_passes() -> Iterator[Counter[str]]:
    """Counts the elements that forward and backward passes gather, by dtype."""
    elements = Counter[str]()
    gather = partition_parameters._dist_allgather_fn

    def counted(part: torch.Tensor, whole: torch.Tensor, group: Any = None) -> Any:
        elements[str(whole.dtype)] += whole.numel()
        return gather(part, whole, group)

    partition_parameters._dist_allgather_fn = counted
    try:
        yield elements
    finally:
        partition_parameters._dist_allgather_fn = gather


def lagging_rows(model: Path, step: int) -> list[Row]:
    """Rollouts of an earlier version: the first step keeps its weights, the second measures its mismatch."""
    sizes = {"num_groups": 4, "num_mini_batches": 2, "longest": 20}
    return with_version(make_rows(model, step=step, noise=0.05, **sizes), step - 2)


def train_case(model: Path, name: str, *, rounded: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Two steps, the second with a mismatch probe; figures, gathered elements and bytes, and every tensor."""
    _, learner, algorithm = CASES[name]
    learner = {"zero_stage": 3, "dtype": "bfloat16", **learner}
    trainer = Trainer(make_config(model, algorithm={"pg_clip": 0.05, **algorithm}, learner=learner), model)
    if not rounded:
        for parameter in trainer.engine.model.parameters():
            vars(parameter).pop(PARAM_COMM_DTYPE_ATTR_NAME, None)
    with gathered_by_passes() as elements:
        first = train(trainer, 4, lagging_rows(model, 4)).metrics
        moments = torch.cat(list(gradient(trainer)))
        second = train(trainer, 5, lagging_rows(model, 5)).metrics
    parameters: list[Any] = list(trainer.engine.model.parameters())
    storages = _storages([trainer.engine.deepspeed], trainer.engine.device.type)
    facts = {
        "figures": [first, second],
        "elements": elements,
        "num_parameters": sum(math.prod(it.ds_shape) for it in parameters),
        "state_bytes": sum(storage.nbytes() for storage, is_refilled in storages if not is_refilled),
    }
    token_S = torch.arange(8)
    with torch.no_grad():  # it leaves weights whole, for a backward pass that does not come
        trainer.engine.deepspeed(token_S[None], None, token_S[:-1], token_S[1:])
    return facts, {"moments": moments, **trainer.engine.policy()}


def main() -> None:
    """Every case in both ways."""
    out, models = Path(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:])
    for name, (model, _, _) in CASES.items():
        for rounded in (True, False):
            facts, tensors = train_case(Path(models[model]), name, rounded=rounded)
            if distributed.get_rank() == 0:
                (out / f"{name}-{rounded}.json").write_text(json.dumps(facts))
                save_file(tensors, out / f"{name}-{rounded}.safetensors")


if __name__ == "__main__":
    main()
