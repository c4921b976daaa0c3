"""Variables that torch, OpenMP and vLLM read when they are loaded: to be set before the first import of any of them.

It imports none of them.
"""

from __future__ import annotations

import os
from pathlib import Path

from gspo.common.config.schema import Config
from gspo.common.host.machine import torch_is_for_cpus
from gspo.common.host.process_tuning import WAITING
from gspo.common.model.files import read_model_config

# Threads float over the cores: a learner shares them, and a bound thread would wait for a core that is taken.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **WAITING}
# The engine's process is forked from one without threads. numpy would start some for linear algebra at its import, and
# pyarrow one for an allocator. The service needs neither.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# vLLM compiles one function of its sampler even where it compiles no model: it counts the tokens that are likelier than
# the sampled one. Compiling takes 24 s at the first start on a machine and 2 s at each later one. Uncompiled it takes
# 4 us longer for every 1,000 tokens of the vocabulary, for each sampled token: more than that is worth compiling.
_SMALL_VOCABULARY = 4096


def import_variables(config: Config) -> dict[str, str]:
    """Variables to set unless the user has set them."""
    if not torch_is_for_cpus():
        return {}
    values = {**CPU_ENVIRONMENT, **_NO_THREADS}
    if config.generation.engine.get("enforce_eager", True) and _vocabulary(config.model.path) <= _SMALL_VOCABULARY:
        values["TORCH_COMPILE_DISABLE"] = "1"
    return values


def generation_threads(configured: int) -> int:
    """Threads of an engine; 0 is every core but one, as in vLLM: its scheduler and event loop need one."""
    return configured or max(1, len(os.sched_getaffinity(0)) - 1)


def threads(config: Config) -> dict[str, str]:
    """The number of threads, which is always ours: without it vLLM takes one thread."""
    return {"OMP_NUM_THREADS": str(generation_threads(config.generation.threads))}


def _vocabulary(model: str) -> float:
    """Tokens of the model in this folder; infinite where it cannot be read, which the service's check refuses."""
    facts = read_model_config(Path(model))
    try:
        return int(facts.get("vocab_size") or facts["text_config"]["vocab_size"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
