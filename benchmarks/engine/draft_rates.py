"""The section `drafts`: the engine with draft tokens beside the engine without, by temperature and requests in flight.

Both engines are started once and take every round one after the other, so that other work on the machine meets both.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks.harness.child_process import run_child
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import side_by_side, table
from benchmarks.harness.workload import KV_CACHE_GIB, PROMPT_LENGTH, model_folder, prompt_token_ids

if TYPE_CHECKING:
    from gspo.generation.engine.vllm_engine import Engine

DRAFT_TOKENS = 4
TEMPERATURES, IN_FLIGHT = (0.1, 1.0), (1, 8, 64)
_TOKENS, _TIMEOUT_S = 256, 900.0
_TEXT = """
One engine has `generation.draft_tokens: {draft_tokens}`, the other none; neither is compiled, as is the default on a \
CPU. Requests of {tokens} tokens each start together, first on the one and then on the other. *With drafts* is the \
rate with drafts over the rate without, the median of {rounds} rounds after the first, with the least and the most. At \
temperature 0.1 the answers of the random model repeat themselves; at 1 they do not.

{rates}
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """All temperatures and numbers of requests with the same two engines; quick: the smallest number."""
    rounds, in_flight = (2, IN_FLIGHT[:1]) if effort.quick else (6, IN_FLIGHT)
    yield Measurement(f"{DRAFT_TOKENS} draft tokens", _measure, (rounds, in_flight))


def _measure(rounds: int, in_flight: tuple[int, ...]) -> Record:
    arguments = {
        "model": str(model_folder("fixed")),
        "prompts": prompt_token_ids("fixed", max(in_flight)),
        "rounds": rounds,
        "in_flight": in_flight,
    }
    return {"rounds": rounds - 1, "rates": run_child(f"{__name__}.compare", arguments, timeout_s=_TIMEOUT_S)}


def compare(model: str, prompts: list[list[int]], rounds: int, in_flight: list[int]) -> list[Record]:
    """Time rounds of requests on an engine without drafts and on one with them. A child process."""
    from gspo.generation.engine.process import CPU_ENVIRONMENT, generation_threads

    # For the engines' processes, which load torch anew.
    os.environ.update({**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(generation_threads(0))})
    return asyncio.run(_compare(Path(model), prompts, rounds, in_flight))


async def _compare(model: Path, prompts: list[list[int]], rounds: int, in_flight: list[int]) -> list[Record]:
    from gspo.common.config.engines import GenerationConfig
    from gspo.generation.engine.vllm_engine import Engine, engine_arguments

    engines = []
    for draft_tokens in (0, DRAFT_TOKENS):
        keys = GenerationConfig(max_rollouts=max(IN_FLIGHT), kv_cache_gb=KV_CACHE_GIB, draft_tokens=draft_tokens)
        engines.append(await Engine.start(engine_arguments(model, keys, max_model_len=PROMPT_LENGTH + _TOKENS)))
    plain, drafting = engines
    rates = []
    for temperature in TEMPERATURES:
        for num_requests in in_flight:
            before, measured = drafting.drafts, []
            for _ in range(rounds):
                chosen = prompts[:num_requests]
                measured.append([await _tokens_per_s(engine, chosen, temperature) for engine in (plain, drafting)])
            proposed, accepted = (after - was for after, was in zip(drafting.drafts, before, strict=True))
            rates.append(
                {
                    "temperature": temperature,
                    "in_flight": num_requests,
                    "tokens_per_s": measured[1:],  # without drafts and with them; the first round warms up
                    "accepted_share": accepted / proposed if proposed else None,
                }
            )
    for engine in engines:
        await engine.stop()
    return rates


async def _tokens_per_s(engine: Engine, prompts: list[list[int]], temperature: float) -> float:
    from gspo.generation.engine.api import EngineSampling

    how = EngineSampling(max_tokens=_TOKENS, temperature=temperature)
    began = time.monotonic()
    answers = await asyncio.gather(*(engine.generate(f"r{n}", ids, how) for n, ids in enumerate(prompts)))
    return sum(len(answer.token_ids) for answer in answers) / (time.monotonic() - began)


def text(results: Results) -> str:
    """Both rates of each case, their ratio, and how many drafts were accepted."""
    (measured,) = results["drafts"]
    frame = pd.DataFrame(measured["rates"])
    pairs: Any = frame.tokens_per_s
    ratios = pairs.map(lambda rounds: [drafting / plain for plain, drafting in rounds])
    rates = table(
        ("temperature", frame.temperature, ".1f"),
        ("in flight", frame.in_flight, ""),
        ("tokens/s without", pairs.map(lambda rounds: median(plain for plain, _ in rounds)), ",.0f"),
        ("tokens/s with", pairs.map(lambda rounds: median(drafting for _, drafting in rounds)), ",.0f"),
        ("with drafts", ratios.map(median), ".2f"),
        ("least to most", side_by_side((ratios.map(min), ".2f"), (ratios.map(max), ".2f"), separator=" to "), ""),
        ("accepted", frame.accepted_share, ".0%"),
    )
    return _TEXT.format(draft_tokens=DRAFT_TOKENS, tokens=_TOKENS, rounds=measured["rounds"], rates=rates)


DRAFTS = PageSection("drafts", "Draft tokens", measurements, text)
