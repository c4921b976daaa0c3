"""Part C, the whole system: `gspo run` with a reward that costs nothing, for every lag, length and arithmetic.

The first steps are dropped: the engine's caches and the pipeline fill up in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq

from benchmarks.harness.gspo_run import END_S, START_S, STEP_S, ObservedRun, observed_run
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.sizes import DTYPES, LAGS, LENGTHS, Dtype, Lengths
from benchmarks.harness.tables import middle
from benchmarks.harness.workload import write_config
from benchmarks.system.window import between, look

_PHASES = ("wait_s", "log_s", "train_s", "publish_s", "step_s", "age_mean", "age_max")
DROPPED = 2


def cases(*, quick: bool, steps: int | None) -> Iterator[Measurement]:
    """All lags at both lengths in float32; in bfloat16 the fixed length. Quick: one lag in float32."""
    num_steps, dropped = (2, 1) if quick else (steps or 8, DROPPED)
    for lengths in LENGTHS:
        for dtype in DTYPES if lengths == "fixed" and not quick else DTYPES[:1]:
            for max_lag in LAGS[1:2] if quick else LAGS:
                spec = (lengths, dtype, max_lag, num_steps, dropped)
                yield Measurement(f"max_lag {max_lag}, {lengths}, {dtype}", _measure, spec)


def _measure(lengths: Lengths, dtype: Dtype, max_lag: int, num_steps: int, dropped: int) -> dict[str, Any]:
    # One step more than is measured: the window ends while everything still runs.
    config = write_config(
        f"system-{lengths}-{dtype}-{max_lag}",
        lengths,
        dtype,
        staleness={"max_lag": max_lag},
        run={"total_steps": num_steps + 1},
    )
    with observed_run(config) as run:
        run.wait_for_step(dropped, START_S + STEP_S * dropped)
        before = asyncio.run(look(run.redis_url, "run", run.process.pid))
        run.wait_for_step(num_steps, STEP_S * num_steps)
        after = asyncio.run(look(run.redis_url, "run", run.process.pid))
        run.wait_for_end(STEP_S + END_S)
    return {
        "lengths": lengths,
        "dtype": dtype,
        "max_lag": max_lag,
        **_steps(run, dropped, num_steps),
        **between(before, after),
        "answer_tokens": _answer_tokens(run.run_dir, range(dropped + 1, num_steps + 1)),
        "first_rollout_s": _first_rollout_unix_s(run.run_dir) - run.started_unix_s,
    }


def _steps(run: ObservedRun, dropped: int, num_steps: int) -> dict[str, Any]:
    """Times from the end of one step to the end of the next, and what the learner did in them."""
    lines = run.lines("metrics.jsonl")[dropped - 1 : num_steps]
    figures = [line["figures"] for line in lines[1:]]
    ends = [line["unix_s"] for line in lines]
    tokens = sum(figure["tokens"] for figure in figures)
    return {
        "num_steps": len(figures),
        "seconds": (ends[-1] - ends[0]) / len(figures),
        "seconds_each": [after - before for before, after in pairwise(ends)],
        "tokens_per_s": tokens / (ends[-1] - ends[0]),
        "tokens_trained": tokens,
        "figures": {name: fmean(figure[name] for figure in figures) for name in _PHASES},
    }


def _answer_tokens(run_dir: Path, steps: range) -> dict[str, float]:
    found: list[int] = []
    for step in steps:
        table = pq.read_table(run_dir / "log" / f"step-{step:06d}.parquet", columns=["token_ids"], partitioning=None)
        found += [len(ids) for ids in table.column("token_ids").to_pylist()]
    return {"median": middle(found), "mean": fmean(found), "max": max(found)}


def _first_rollout_unix_s(run_dir: Path) -> float:
    path = run_dir / "log" / "step-000001.parquet"
    table = pq.read_table(path, columns=["finished_unix_s"], partitioning=None)
    return float(min(table.column(0).to_pylist()))
