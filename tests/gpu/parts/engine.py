"""Our engine beside `vllm bench throughput` on the same model, and the rates of reading and sampling.

Ours gives a log-prob and a version with every token, and no text; vLLM's benchmark text alone.
"""

from __future__ import annotations

import math
import time

from gspo.common.planning.memory import DTYPE_BYTES
from gspo.common.planning.model_profile import ModelProfile
from gspo.generation.engine.vllm_engine import Engine
from gspo.learner.model.profile import profile
from tests.gpu.bench_throughput import bench_throughput
from tests.gpu.decode_rates import DecodePass, decode_rates
from tests.gpu.engine_calls import answers, engine_of, prompts_of, random_prompts, used_gpu_gib
from tests.gpu.part_run import PartRun

_BYTES = DTYPE_BYTES["bfloat16"]


async def run(case: PartRun) -> None:
    """vLLM's benchmark, then our engine: start, warm up, sample, and read long prompts."""
    sizes = case.sizes
    bench_tokens_per_s = bench_throughput(case)
    case.note(bench_tokens_per_s=bench_tokens_per_s)
    prompts, num_tokens = prompts_of(case), sizes.answer_tokens
    async with engine_of(
        case, "bfloat16", longest=max(sizes.long_prompt_tokens, sizes.prompt_tokens + num_tokens) + 1
    ) as engine:
        case.note(kv_tokens=engine.kv_capacity_tokens, used_gib=used_gpu_gib())
        # As many requests as are timed: vLLM prepares for the shapes that it meets.
        await answers(engine, prompts_of(case, seed=1), min(16, num_tokens), "warm")
        began = time.monotonic()
        done = await answers(engine, prompts, num_tokens, "timed")
        seconds = time.monotonic() - began
        alone_s = await _sample_alone(case, engine)
        prefill_s, num_read = await _read_prompts(case, engine)
    tokens_per_s = len(prompts) * num_tokens / seconds
    case.note(tokens_per_s=tokens_per_s)
    case.judge("share of vllm bench", tokens_per_s / bench_tokens_per_s, at_least=0.95)
    if case.card is not None:
        counts = profile(case.model)
        together = DecodePass(seconds / num_tokens, _read_bytes(case, counts, sizes.num_requests))
        alone = DecodePass(alone_s / num_tokens, _read_bytes(case, counts, 1))
        # The gathered logits of prompts are those of their last tokens alone.
        flops = counts.flops.forward(sizes.long_prompt_tokens, 1) * num_read / sizes.long_prompt_tokens
        case.measure(prefill_flops_share=flops / prefill_s / case.card.flops)
        case.measure(**decode_rates(alone, together, case.card))
    case.require(all(len(it.token_ids) == num_tokens for it in done), "an answer has another length than asked for")
    logp = [value for it in done for value in it.logp]
    case.require(all(math.isfinite(value) and value <= 0 for value in logp), "a log-prob is not finite, or above 0")
    case.require({version for it in done for version in it.version} == {0}, "a token is of another version than 0")
    case.require(len({tuple(it.token_ids) for it in done}) > 1, "all answers are the same")


async def _sample_alone(case: PartRun, engine: Engine) -> float:
    """Seconds of one request alone."""
    began = time.monotonic()
    await answers(engine, prompts_of(case, seed=3)[:1], case.sizes.answer_tokens, "alone")
    seconds = time.monotonic() - began
    case.note(alone_tokens_per_s=case.sizes.answer_tokens / seconds)
    return seconds


async def _read_prompts(case: PartRun, engine: Engine) -> tuple[float, int]:
    """Seconds that long prompts take to be read, and their tokens."""
    prompts = random_prompts(max(1, case.sizes.num_requests // 16), case.sizes.long_prompt_tokens, seed=2)
    began = time.monotonic()
    await answers(engine, prompts, 1, "long")
    seconds, num_read = time.monotonic() - began, len(prompts) * case.sizes.long_prompt_tokens
    case.note(prompt_tokens_per_s=num_read / seconds)
    return seconds, num_read


def _read_bytes(case: PartRun, counts: ModelProfile, num_sequences: int) -> float:
    """Bytes that a pass of sampling must read in the mean: the weights, and the cache of every sequence."""
    cached = case.sizes.prompt_tokens + (case.sizes.answer_tokens - 1) / 2
    return _BYTES * (counts.flops.body + counts.flops.head + num_sequences * cached * counts.num_kv)
