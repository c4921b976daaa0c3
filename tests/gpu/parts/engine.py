"""vLLM starts on the model in bfloat16 and generates; neighbours: asking.py."""

from __future__ import annotations

import math
import time

from tests.gpu.engine_calls import answers, engine_of, prompts_of, used_gpu_gib
from tests.gpu.part_run import PartRun


async def run(case: PartRun) -> None:
    """Start, warm up, generate, and look at what came."""
    prompts, num_tokens = prompts_of(case), case.sizes.answer_tokens
    async with engine_of(case, "bfloat16") as engine:
        case.note(kv_tokens=engine.kv_capacity_tokens, used_gib=used_gpu_gib())
        await answers(engine, prompts, min(16, num_tokens), "warm")
        began = time.monotonic()
        done = await answers(engine, prompts, num_tokens, "timed")
        case.note(tokens_per_s=len(prompts) * num_tokens / (time.monotonic() - began))
    case.require(all(len(it.token_ids) == num_tokens for it in done), "an answer has another length than asked for")
    logp = [value for it in done for value in it.logp]
    case.require(all(math.isfinite(value) and value <= 0 for value in logp), "a log-prob is not finite, or above 0")
    case.require({version for it in done for version in it.version} == {0}, "a token is of another version than 0")
    case.require(len({tuple(it.token_ids) for it in done}) > 1, "all answers are the same")
