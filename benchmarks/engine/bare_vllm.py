"""A child process: vLLM by itself answers given prompts by `LLM.generate`; no service, no Redis, no learner."""

from __future__ import annotations

import os
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

from benchmarks.harness.child_process import serve
from benchmarks.harness.sizes import NUM_ROLLOUTS
from gspo.generation.engine.process_environment import CPU_ENVIRONMENT, generation_threads
from gspo.generation.engine.vllm_engine import IN_PROCESS_EXECUTOR

# What the generation service hands to vLLM; `defaults` hands over none of it.
_OUR_ENGINE: dict[str, Any] = {
    "distributed_executor_backend": IN_PROCESS_EXECUTOR,
    "logprobs_mode": "processed_logprobs",
    "enable_prefix_caching": True,
    "max_num_seqs": NUM_ROLLOUTS,
}
_OUR_SAMPLING: dict[str, Any] = {
    "logprobs": 0,
    "flat_logprobs": True,
    "detokenize": False,
    "output_kind": RequestOutputKind.FINAL_ONLY,
}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds and tokens of every round over the prompts; the first one warms up."""
    ours = spec["settings"] == "ours"
    if ours:
        # For the engine process, which loads torch anew.
        os.environ.update({**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(generation_threads(0))})
    began = time.monotonic()
    llm = LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        max_model_len=spec["max_model_len"],
        kv_cache_memory_bytes=spec["kv_cache_bytes"],
        disable_log_stats=True,
        **(_OUR_ENGINE if ours else {}),
    )
    start_s = time.monotonic() - began
    sampling = SamplingParams(temperature=1.0, max_tokens=spec["max_tokens"], **(_OUR_SAMPLING if ours else {}))
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in spec["prompts"]]
    return {"start_s": start_s, "rounds": [_round(llm, prompts, sampling) for _ in range(spec["rounds"])]}


def _round(llm: LLM, prompts: list[TokensPrompt], sampling: SamplingParams) -> dict[str, float]:
    began = time.monotonic()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.monotonic() - began
    return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


if __name__ == "__main__":
    serve(measure)
