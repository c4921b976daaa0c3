"""A child process: the experts that vLLM chooses, with a policy in a given dtype, for tokens that were sampled before.

vLLM reads prompt and answer as one prompt, each alone: what differs between its reading and its sampling is not seen.
It runs in this process, because only here its routers can be asked.
"""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from typing import Any

import torch

from benchmarks.harness.child_process import serve

# Read when vLLM is imported: the engine in this process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
_LONGEST = 256
_KV_CACHE_BYTES = 1 << 28


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """`experts`: for each of `inputs`, [T, layers, 2] from its place in `starts` on."""
    from vllm import LLM, SamplingParams

    from gspo.generation.engine.vllm_engine import IN_PROCESS_EXECUTOR

    llm = LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        enforce_eager=True,
        distributed_executor_backend=IN_PROCESS_EXECUTOR,
        max_model_len=_LONGEST,
        enable_prefix_caching=False,
        max_num_seqs=1,  # one answer after the other, each in one forward
        kv_cache_memory_bytes=_KV_CACHE_BYTES,
    )
    chosen: dict[int, list[torch.Tensor]] = defaultdict(list)
    llm.apply_model(partial(_listen, chosen))
    prompts = [{"prompt_token_ids": token_ids} for token_ids in spec["inputs"]]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    lengths = [len(token_ids) for token_ids in spec["inputs"]]
    for forwards in chosen.values():
        if [len(expert_TK) for expert_TK in forwards] != lengths:
            raise AssertionError("the routers did not see each answer once, in its order")
    layers = [chosen[layer] for layer in sorted(chosen)]
    answers = [torch.stack(of_layers, dim=1) for of_layers in zip(*layers, strict=True)]
    return {"experts": [a[start:].tolist() for a, start in zip(answers, spec["starts"], strict=True)]}


def _listen(chosen: dict[int, list[torch.Tensor]], model: torch.nn.Module) -> None:
    """Have every router add the experts of each forward to `chosen`, by layer."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in model.modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(partial(_keep, chosen, module.layer_id))


def _keep(chosen: dict[int, list[torch.Tensor]], layer: int, expert_TK: torch.Tensor) -> None:
    chosen[layer].append(expert_TK.clone())


if __name__ == "__main__":
    serve(measure)
