"""The section `engine`: bare vLLM by its own defaults and with our settings, and our generation service."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pandas as pd

from benchmarks.harness.child_process import run_child
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.services import RunningServices, running_services
from benchmarks.harness.tables import table
from benchmarks.harness.workload import (
    GROUP_SIZE,
    GROUPS,
    KV_CACHE_GIB,
    MAX_TOKENS,
    NUM_ROLLOUTS,
    PROMPT_LENGTH,
    Dtype,
    Lengths,
    cases,
    model_folder,
    prompt_token_ids,
    write_config,
)
from gspo.common.config.loading import read_config
from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.inbox import FIELD, append
from gspo.common.streams.instances import wait_for_instance
from gspo_proto.rollout_pb2 import GroupTask, Prompt, Rollout
from gspo_proto.rollout_pb2 import Sampling as TaskSampling

_TIMEOUT_S, _START_S, _ROUND_S = 900.0, 240.0, 300.0
SERVICE = "service"
SETTINGS = {
    "defaults": "`LLM.generate`, vLLM's defaults",
    "ours": "`LLM.generate`, our settings",
    SERVICE: "our service",
}
_TEXT = """
Every row has the same prompts and is a process alone on the machine. Values are medians of the rounds after the first.

- vLLM's defaults: `LLM.generate` with model, dtype, length and KV cache size. It has compiled graphs, a worker \
process with bound threads, and text, but no log-probs.
- Our settings: the arguments of the generation service in these benchmarks. It has compiled graphs \
(`generation.engine: {{enforce_eager: false}}`), the model in the scheduler's process, unbound threads on all cores \
but one, log-probs, and no text.
- Our service: the generation service and Redis, from the tasks in its stream to the last rollout in the next.

{rates}
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Every length and dtype, in three ways each; quick: the first."""
    rounds = 2 if effort.quick else 3
    for lengths, dtype in cases(effort.quick):
        for settings in SETTINGS:
            yield Measurement(f"{settings}, {lengths}, {dtype}", _measure, (lengths, dtype, settings, rounds))


def _measure(lengths: Lengths, dtype: Dtype, settings: str, rounds: int) -> Record:
    if settings == SERVICE:
        measured = asyncio.run(_serve(lengths, dtype, rounds))
    else:
        arguments = {
            "model": str(model_folder(lengths)),
            "dtype": dtype,
            "token_ids": [ids for ids in prompt_token_ids(lengths, GROUPS) for _ in range(GROUP_SIZE)],
            "max_tokens": MAX_TOKENS[lengths],
            "rounds": rounds,
            "ours": settings == "ours",
        }
        measured = run_child(f"{__name__}.generate", arguments, timeout_s=_TIMEOUT_S)
    frame = pd.DataFrame(measured["rounds"][1:])  # the first one warms up
    medians = frame.assign(tokens_per_s=frame.tokens / frame.seconds).median()
    return {"lengths": lengths, "dtype": dtype, "settings": settings, **medians.to_dict(), **measured}


def generate(
    model: str, dtype: str, token_ids: list[list[int]], max_tokens: int, rounds: int, ours: bool
) -> dict[str, Any]:
    """Time rounds of `LLM.generate` over prompts, with the arguments of our service or without. A child process."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    from gspo.generation.engine.process import CPU_ENVIRONMENT, generation_threads
    from gspo.generation.engine.vllm_engine import IN_PROCESS_EXECUTOR

    engine: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    if ours:
        # For the engine process, which loads torch anew.
        os.environ.update({**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(generation_threads(0))})
        engine = {
            "distributed_executor_backend": IN_PROCESS_EXECUTOR,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "max_num_seqs": NUM_ROLLOUTS,
        }
        final = RequestOutputKind.FINAL_ONLY
        sampling = {"logprobs": 0, "flat_logprobs": True, "detokenize": False, "output_kind": final}
    began = time.monotonic()
    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=PROMPT_LENGTH + max_tokens,
        kv_cache_memory_bytes=int(KV_CACHE_GIB * 2**30),
        disable_log_stats=True,
        **engine,
    )
    start_s = time.monotonic() - began
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in token_ids]
    parameters = SamplingParams(temperature=1.0, max_tokens=max_tokens, **sampling)
    results = []
    for _ in range(rounds):
        began = time.monotonic()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.monotonic() - began
        results.append({"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)})
    return {"start_s": start_s, "rounds": results}


async def _serve(lengths: Lengths, dtype: Dtype, rounds: int) -> dict[str, Any]:
    config = read_config(write_config(f"service-{lengths}-{dtype}", lengths, dtype))
    token_ids = prompt_token_ids(lengths, GROUPS)
    async with running_services(config, "generation") as services:
        began = time.monotonic()
        await wait_for_instance(services.redis, services.keys, "generation", _START_S)
        start_s = time.monotonic() - began
        return {"start_s": start_s, "rounds": [await _round(services, token_ids, lengths, n) for n in range(rounds)]}


async def _round(services: RunningServices, prompts: list[list[int]], lengths: Lengths, number: int) -> Record:
    redis, stream = services.redis, services.keys.rollouts
    deadline = time.time() + _ROUND_S
    tasks = [
        GroupTask(
            schema=SCHEMA,
            group=number * GROUPS + place,
            attempt=1,
            num_rollouts=GROUP_SIZE,
            prompt=Prompt(token_ids=token_ids),
            sampling=TaskSampling(temperature=1.0, max_tokens=MAX_TOKENS[lengths]),
            issued_unix_s=time.time(),
            deadline_unix_s=deadline,
        )
        for place, token_ids in enumerate(prompts)
    ]
    began = time.monotonic()
    await append(redis, services.keys.prompts, [task.SerializeToString() for task in tasks])
    await services.wait_for_entries(stream, NUM_ROLLOUTS, _ROUND_S)
    seconds = time.monotonic() - began
    entries: Any = await redis.xrange(stream)
    await redis.xdel(stream, *(entry for entry, _ in entries))
    tokens = sum(len(Rollout.FromString(fields[FIELD]).token_ids) for _, fields in entries)
    return {"seconds": seconds, "tokens": tokens}


def text(results: Results) -> str:
    """Tokens a second of each way, and the service's share of the rates of bare vLLM."""
    frame = pd.DataFrame(results["engine"])
    rates = frame.pivot_table(index=["lengths", "dtype"], columns="settings", values="tokens_per_s")
    bare = rates.reindex(columns=["defaults", "ours"]).reindex(pd.MultiIndex.from_frame(frame[["lengths", "dtype"]]))
    shares = (1 / bare).mul(frame.tokens_per_s.where(frame.settings == SERVICE).to_numpy(), axis=0)
    return _TEXT.format(
        rates=table(
            ("", frame.settings.map(SETTINGS) + ", " + frame.lengths + ", " + frame.dtype, ""),
            ("tokens/s", frame.tokens_per_s, ",.0f"),
            ("s for all", frame.seconds, ".2f"),
            ("of defaults", shares.defaults, ".0%"),
            ("of ours", shares.ours, ".0%"),
            ("start, s", frame.start_s, ".0f"),
        )
    )


ENGINE = PageSection("engine", "The engine alone", measurements, text)
