"""The experts that the learner and vLLM choose for the tokens of a run's last step. Only child processes import it."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gspo.common.config.loading import read_config
from gspo.common.model.files import model_folder
from gspo.learner.storage.step_log import StepLog
from gspo.learner.training.trainer import Trainer
from gspo.learner.training.trainer_api import configured_hyperparameters

_KV_CACHE_BYTES = 1 << 28


def learner_experts(run_dir: str, step: int, before: str, after: str) -> dict[str, Any]:
    """Train a step again from the checkpoint before it, as a recovery would, and compare the experts around it.

    Returns:
        `inputs`: prompt and answer of each rollout without its last token. `starts`: the place in it from which on an
        answer's tokens are predicted. `before` and `after`: the experts at these places, [T, layers, 2] each. Both
        policies stay in the folders of that name, in float32.
    """
    run = Path(run_dir)
    config = read_config(run / "config.yaml")
    config = config.with_keys(generation={"dtype": "float32"})
    rows = StepLog(run / "log").read(step)
    trainer = Trainer(config, model_folder(config.model))
    trainer.engine.load(run / "checkpoints" / f"step-{step - 1:06d}")
    trainer.engine.export(Path(before))
    trainer.train(step, rows, (), configured_hyperparameters(config, step))
    trainer.engine.export(Path(after))
    inputs = [[*row.prompt_token_ids.tolist(), *row.token_ids[:-1].tolist()] for row in rows]
    starts = [len(row.prompt_token_ids) - 1 for row in rows]
    experts = {name: _experts(folder, inputs, starts) for name, folder in (("before", before), ("after", after))}
    return {"inputs": inputs, "starts": starts, **experts}


@torch.inference_mode()
def _experts(folder: str, inputs: list[list[int]], starts: list[int]) -> list[Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        # A router gives logits, scores and the experts' numbers [T, 2].
        layer.mlp.gate.register_forward_hook(lambda *called: chosen.append(called[-1][2]))
    answers = []
    for token_ids, start in zip(inputs, starts, strict=True):
        chosen.clear()
        model(torch.tensor([token_ids]), use_cache=False)
        answers.append(torch.stack(chosen, dim=1)[start:].tolist())
    return answers


def engine_experts(model: str, dtype: str, inputs: list[list[int]], starts: list[int]) -> list[Any]:
    """The experts of vLLM in a dtype, for each of `inputs` [T, layers, 2] from its place in `starts` on.

    vLLM reads prompt and answer as one prompt, each alone, so a difference between its reading and its sampling does
    not show.
    """
    # Read when vLLM is imported: the engine runs in this process, where its routers can be asked.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from gspo.generation.engine.vllm_engine import IN_PROCESS_EXECUTOR

    llm = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        distributed_executor_backend=IN_PROCESS_EXECUTOR,
        max_model_len=max(map(len, inputs)) + 1,
        enable_prefix_caching=False,
        max_num_seqs=1,  # one answer after the other, each in one forward
        kv_cache_memory_bytes=_KV_CACHE_BYTES,
    )
    chosen: dict[int, list[torch.Tensor]] = defaultdict(list)
    llm.apply_model(partial(_listen, chosen))
    prompts = [{"prompt_token_ids": token_ids} for token_ids in inputs]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    lengths = [len(token_ids) for token_ids in inputs]
    for forwards in chosen.values():
        if [len(expert_TK) for expert_TK in forwards] != lengths:
            raise AssertionError("the routers did not see each answer once, in its order")
    layers = [chosen[layer] for layer in sorted(chosen)]
    answers = [torch.stack(of_layers, dim=1) for of_layers in zip(*layers, strict=True)]
    return [answer[start:].tolist() for answer, start in zip(answers, starts, strict=True)]


def _listen(chosen: dict[int, list[torch.Tensor]], model: torch.nn.Module) -> None:
    """Have every router add the experts of each forward to `chosen`, by layer."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in model.modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(
                lambda expert_TK, layer=module.layer_id: chosen[layer].append(expert_TK.clone())
            )
