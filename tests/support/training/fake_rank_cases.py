"""One of 64 ranks that train Qwen3-32B under ZeRO 3, without data, for test_planned_ranks.py.

Called as `-m tests.support.training.fake_rank_cases OUT LAYERS`. Tensors are torch's fake ones, with shapes alone, and
so is the process group, which sends nothing. All else is DeepSpeed's own code. It writes what one rank holds, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import partitioned_param_coordinator, stage3
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.initialization import no_init_weights

from gspo.learner.training.deepspeed_config import engine_config
from gspo.learner.training.policy_engine import update_in_place
from tests.support.training.rollout_rows import make_config

NUM_RANKS = 64
# https://huggingface.co/Qwen/Qwen3-32B, config.json, but for the number of layers.
_QWEN3_32B = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def main() -> None:
    """Train two steps: in the second one DeepSpeed gathers weights ahead."""
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE=str(NUM_RANKS))
    distributed.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    # DeepSpeed decides this by values: that the norm is finite, and that all ranks use weights in the same order.
    stage3.is_invalid_grad_norm = lambda _: False
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None
    # Its shared-memory kernels need a build.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    config = engine_config(make_config(Path.cwd(), learner={"zero_stage": 3, "deepspeed": {}}))
    model = Qwen3Config(**_QWEN3_32B, num_hidden_layers=int(sys.argv[2]))
    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
        causal_lm = AutoModelForCausalLM.from_config(model, dtype=torch.float32)
        num_parameters = causal_lm.num_parameters()
        deepspeed.zero.Init(module=causal_lm, config_dict_or_path=config, dtype=torch.float32)
        optimizer = torch.optim.AdamW(causal_lm.parameters(), lr=1e-6, fused=True)
        engine = deepspeed.initialize(model=causal_lm, optimizer=optimizer, config=config)[0]
        update_in_place(engine)
        measured = train(engine, optimizer)
    Path(sys.argv[1]).write_text(json.dumps({"num_parameters": num_parameters, **measured}))


def train(engine: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Two steps: bytes of all tensors while the optimizer updates and between steps, and gathered elements."""
    gathered, at_updates = [0], [0]

    def count(*_: object) -> None:
        gathered.append(sum(parameter.numel() for parameter in engine.module.parameters()))

    for module in engine.module.modules():
        module.register_forward_pre_hook(count)
    optimizer.register_step_pre_hook(lambda *_: at_updates.append(tensor_bytes()))
    token_RS = torch.zeros(1, 64, dtype=torch.long)
    for _ in range(2):
        engine.backward(engine(input_ids=token_RS, labels=token_RS).loss)
        engine.step()
    return {"at_update": max(at_updates), "between_steps": tensor_bytes(), "gathered_elements": max(gathered)}


def tensor_bytes() -> int:
    """Bytes of every tensor that there is."""
    tensors = [it for it in gc.get_objects() if issubclass(type(it), torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


if __name__ == "__main__":
    main()
