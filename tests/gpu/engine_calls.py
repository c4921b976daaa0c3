"""vLLM as the generation service runs it: start it, ask it, and what it holds.

It judges nothing.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from gspo.common.config.engines import GenerationConfig
from gspo.generation.engine.api import Completion, EngineSampling
from gspo.generation.engine.vllm_engine import Engine, engine_arguments
from tests.gpu.part_run import PartRun


@asynccontextmanager
async def engine_of(case: PartRun, dtype: str, model: Path | None = None) -> AsyncIterator[Engine]:
    """The service's engine on the model; `start_s` is noted."""
    sizes = case.sizes
    began = time.monotonic()
    config = GenerationConfig(
        dtype=dtype, max_rollouts=sizes.num_requests, kv_cache_gb=0.25, engine=case.engine_arguments
    )
    arguments = engine_arguments(model or case.model, config, max_model_len=sizes.prompt_tokens + sizes.answer_tokens)
    engine = await Engine.start(arguments)
    case.note(start_s=time.monotonic() - began)
    try:
        yield engine
    finally:
        await engine.stop()


def prompts_of(case: PartRun, seed: int = 0) -> list[list[int]]:
    """Random tokens of the tokenizer, as long as the sizes say."""
    rng, sizes = np.random.default_rng(seed), case.sizes
    return [rng.integers(3, 90, sizes.prompt_tokens).tolist() for _ in range(sizes.num_requests)]


async def answers(engine: Engine, prompts: Sequence[list[int]], max_tokens: int, name: str) -> list[Completion]:
    """One answer of exactly so many tokens to each prompt, all at once."""
    sampling = EngineSampling(max_tokens=max_tokens, ignore_eos=True)
    return list(
        await asyncio.gather(*(engine.generate(f"{name}-{n}", prompt, sampling) for n, prompt in enumerate(prompts)))
    )


def used_gpu_gib() -> float:
    """Memory that all processes hold on the first GPU; 0 without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return int(printed.split()[0]) / 1024
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0.0
