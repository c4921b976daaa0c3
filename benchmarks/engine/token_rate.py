"""Part A, the engine: vLLM alone by its own defaults, alone as we set it, and inside our generation service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.harness.child_process import run_child
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.single_service import measure as measure_service
from benchmarks.harness.sizes import (
    DTYPES,
    GROUP_SIZE,
    GROUPS,
    KV_CACHE_GIB,
    LENGTHS,
    MAX_TOKENS,
    PROMPT_LENGTH,
    Dtype,
    Lengths,
)
from benchmarks.harness.tables import middle
from benchmarks.harness.workload import model_folder, prompt_token_ids

_TIMEOUT_S = 900.0
SERVICE = "service"
SETTINGS = {
    "defaults": "`LLM.generate`, vLLM's defaults",
    "ours": "`LLM.generate`, our settings",
    SERVICE: "our service",
}


def cases(*, quick: bool) -> Iterator[Measurement]:
    """Every length and arithmetic, in three ways each; quick: one of each."""
    rounds = 2 if quick else 3
    for lengths in LENGTHS[:1] if quick else LENGTHS:
        for dtype in DTYPES if lengths == "fixed" and not quick else DTYPES[:1]:
            for settings in SETTINGS:
                yield Measurement(f"{settings}, {lengths}, {dtype}", _measure, (lengths, dtype, settings, rounds))


def _measure(lengths: Lengths, dtype: Dtype, settings: str, rounds: int) -> dict[str, Any]:
    if settings == SERVICE:
        found = measure_service(lengths, dtype, rounds)
    else:
        found = run_child("engine.bare_vllm", _spec(lengths, dtype, settings, rounds), timeout_s=_TIMEOUT_S)
    measured = found["rounds"][1:]
    return {
        "lengths": lengths,
        "dtype": dtype,
        "settings": settings,
        "start_s": found["start_s"],
        "seconds": middle([round_["seconds"] for round_ in measured]),
        "tokens_per_s": middle([round_["tokens"] / round_["seconds"] for round_ in measured]),
        "tokens": middle([round_["tokens"] for round_ in measured]),
        "rounds": found["rounds"],
    }


def _spec(lengths: Lengths, dtype: Dtype, settings: str, rounds: int) -> dict[str, Any]:
    return {
        "settings": settings,
        "model": str(model_folder(lengths)),
        "dtype": dtype,
        "max_model_len": PROMPT_LENGTH + MAX_TOKENS[lengths],
        "kv_cache_bytes": int(KV_CACHE_GIB * 2**30),
        "prompts": [ids for ids in prompt_token_ids(lengths, GROUPS) for _ in range(GROUP_SIZE)],
        "max_tokens": MAX_TOKENS[lengths],
        "rounds": rounds,
    }
