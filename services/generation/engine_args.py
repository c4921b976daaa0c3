"""Which of vLLM's engine arguments a user may pass through `generation.engine`, and the ones that are ours.

What it is not: a check of values, which vLLM makes itself when the engine starts.
Neighbours: the config check before a run, and Engine, which merges the mapping with its own arguments.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

# Engine arguments that follow from other keys or that the correctness of a run rests on, with the way to go instead.
OWN_ARGS: Mapping[str, str] = {
    "model": "set `model.path`",
    "tokenizer": "the tokenizer of `model.path` is used",
    "dtype": "set `generation.dtype`",
    "seed": "set `seed`",
    "max_model_len": "it is algorithm.prompt_length + response_length",
    "logprobs_mode": "training needs the log-probs of the distribution that was sampled from",
    "weight_transfer_config": "the weights come from the learner",
    "enable_prefix_caching": "the prompts of a group share their prefix",
    "max_num_seqs": "set `generation.max_rollouts`",
    "kv_cache_memory_bytes": "set `generation.kv_cache_gb`",
    "disable_log_stats": "the service counts itself, see /metrics",
    "enable_log_requests": "requests are logged by rollout id",
    "trust_remote_code": "set `model.trust_remote_code`",
    "load_format": "models are read from safetensors only",
    "generation_config": "sampling is set by the run's own keys",
    "override_generation_config": "sampling is set by the run's own keys",
    "data_parallel_size": "set `generation.replicas`, each an engine with weights of its own",
    "speculative_config": "the draft model would not follow the policy",
    "runner": "the engine generates",
    "skip_tokenizer_init": "stop strings need the tokenizer",
}


@cache
def engine_arg_names() -> frozenset[str]:
    """The fields of vLLM's AsyncEngineArgs, read from its source: importing it takes seconds and much memory.

    ModuleNotFoundError without vLLM.
    """
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not installed; install the `cpu` or `cuda` extra", name="vllm")
    source = Path(package.submodule_search_locations[0], "engine", "arg_utils.py").read_text()
    names = {
        line.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    return frozenset(names)


def check_engine_args(engine: Mapping[str, Any]) -> None:
    """ValueError for the first key of `generation.engine` that vLLM does not know or that is not the user's."""
    for name, value in engine.items():
        key = f"generation.engine.{name}: {value!r}"
        if name in OWN_ARGS:
            raise ValueError(f"{key} is set by the generation service itself; {OWN_ARGS[name]}; remove the key")
        if name not in engine_arg_names():
            nearest = difflib.get_close_matches(name, engine_arg_names() - OWN_ARGS.keys(), n=1)
            hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
            raise ValueError(f"{key} is no engine argument of the installed vLLM{hint}")
