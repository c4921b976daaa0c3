"""vLLM as the generation service runs it: start it, ask it, and what it holds.

It judges nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gspo.common.config.engines import GenerationConfig
from gspo.common.config.schema import ModelConfig
from gspo.common.host.machine import GIB, visible_gpus
from gspo.generation.engine.api import Completion, EngineSampling
from gspo.generation.engine.process import WHOLE_FLOAT32
from gspo.generation.engine.startup import import_engine
from gspo.generation.engine.vllm_engine import Engine, engine_arguments
from tests.gpu.part_run import PartRun


@asynccontextmanager
async def engine_of(
    case: PartRun, dtype: str, model: Path | None = None, *, longest: int = 0, sleeps: bool = False, **engine: Any
) -> AsyncIterator[Engine]:
    """The service's engine on the model; `start_s` is noted.

    Args:
        longest: Tokens of the longest request; those of the sizes by default.
        sleeps: Whether it can be put to sleep.
        engine: Further arguments of vLLM.
    """
    sizes = case.sizes
    if dtype == "float32":
        os.environ.update(WHOLE_FLOAT32)
    began = time.monotonic()
    config = GenerationConfig(
        dtype=dtype, max_rollouts=sizes.num_requests, kv_cache_gb=0.25, engine={**case.engine_arguments, **engine}
    )
    longest = longest or sizes.prompt_tokens + sizes.answer_tokens
    model = model or case.model
    import_engine(ModelConfig(path=str(model)))
    arguments = engine_arguments(model, config, max_model_len=longest, sleeps=sleeps)
    started = await Engine.start(arguments, process=case.process)
    case.note(start_s=time.monotonic() - began)
    try:
        yield started
    finally:
        await started.stop()


def prompts_of(case: PartRun, seed: int = 0) -> list[list[int]]:
    """Random tokens of the tokenizer, as many and as long as the sizes say."""
    return random_prompts(case.sizes.num_requests, case.sizes.prompt_tokens, seed)


def random_prompts(number: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    """Random tokens of the tokenizer."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 90, num_tokens).tolist() for _ in range(number)]


async def answers(engine: Engine, prompts: Sequence[list[int]], max_tokens: int, name: str) -> list[Completion]:
    """One answer of exactly so many tokens to each prompt, all at once."""
    sampling = EngineSampling(max_tokens=max_tokens, ignore_eos=True)
    return list(
        await asyncio.gather(*(engine.generate(f"{name}-{n}", prompt, sampling) for n, prompt in enumerate(prompts)))
    )


def used_gpu_gib() -> float:
    """Memory that all processes hold on the first GPU that this one sees; 0 without one."""
    return next((gpu.used_bytes / GIB for gpu in visible_gpus()), 0.0)
