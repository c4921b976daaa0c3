"""The section `pipeline`: rollouts a second through all services with an engine and a step that take no time.

Coordinator, Redis, generation, reward with its sandbox, assembly, log and push are the real services. Beside them is
the rate of Redis alone for entries of the same size.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from redis import Redis

from benchmarks.harness.child_process import MeasurementError, process_tree, processor_s
from benchmarks.harness.gspo_run import logged
from benchmarks.harness.plots import panels
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.services import running_services
from benchmarks.harness.tables import table
from benchmarks.harness.workload import make_model, write_config
from benchmarks.simulated.run import simulated
from benchmarks.simulated.settings import Settings
from gspo.common.config.loading import read_config
from gspo.common.config.schema import Config
from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.keys import SERVICES
from gspo.view.picture.curves import BLUE, GREEN, ORANGE, PURPLE, RED, SKY
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout

TOKENS = 1000
GROUPS, GROUP_SIZE = 64, 8
STEP_ROLLOUTS = GROUPS * GROUP_SIZE
# Enough batches in flight that no service waits for a whole round: it measures work, not the length of a round.
MAX_LAG = 4
# The first steps fill the pipeline.
WARM_STEPS = 4
_START_S, _STEP_S, _LOOK_S = 120.0, 60.0, 0.25
_ROLLOUTS, _LONG_ROLLOUTS, _ENTRIES, _BATCH = 40_000, 200_000, 20_000, 64
_QUARTERS = ("after a quarter, MiB", "half", "three quarters", "at the end")
_TEXT = """
All services with a simulated engine and trainer that take no time (`benchmarks/simulated`). Answers of {tokens:,} \
tokens pass through the prompts, rollouts, a sandboxed trivial reward function, assembly, the step log and a push of a \
very small model, with max_lag {max_lag}. The columns *ms* are the processor time of a service and its children for \
one rollout. *Redis alone*: a bare client adds, reads, acknowledges and removes entries of the same size, {batch} in a \
pipeline. A rollout passes two streams.

{rates}

### Memory

Resident memory of each service and its children, with one replica each.

{memory}

![Memory](benchmarks-memory.png)
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Redis alone, the rate with two replicas of generation and reward, and memory over many rollouts with one."""
    yield Measurement("redis alone", _measure_redis, (TOKENS, 2000 if effort.quick else _ENTRIES))
    for replicas, rollouts in ((2, _ROLLOUTS), (1, _LONG_ROLLOUTS)):
        yield Measurement(f"{replicas} replica(s)", _measure, (replicas, 4096 if effort.quick else rollouts, TOKENS))


def _measure_redis(tokens: int, num_entries: int) -> Record:
    """Entries a second through one stream: added, read by a group, acknowledged and removed."""
    payload = example_rollout(tokens).SerializeToString()
    per_s = asyncio.run(_redis_rate(payload, num_entries))
    return {"what": "redis", "tokens": tokens, "bytes": len(payload), "per_s": per_s}


def example_rollout(tokens: int) -> Rollout:
    """A finished answer of so many tokens."""
    return Rollout(
        schema=SCHEMA,
        num_rollouts=GROUP_SIZE,
        prompt=Prompt(token_ids=range(3, 11), text="12+34="),
        token_ids=[3 + n % 90 for n in range(tokens)],
        logp=[-0.5] * tokens,
        version=[1] * tokens,
        mask=b"\1" * tokens,
        text="7" * tokens,
        outcome=OUTCOME_EOS,
        attempt=1,
        temperature=1.0,
    )


async def _redis_rate(payload: bytes, num_entries: int) -> float:
    config = read_config(write_config("redis", "fixed", "float32"))
    async with running_services(config) as services:
        with Redis.from_url(services.redis_url, protocol=2) as redis:
            redis.xgroup_create("s", "g", mkstream=True)
            for count in (4 * _BATCH, num_entries):  # the first ones warm up
                began = time.perf_counter()
                for _ in range(0, count, _BATCH):
                    _pass(redis, payload)
            return num_entries / (time.perf_counter() - began)


def _pass(redis: Redis, payload: bytes) -> None:
    with redis.pipeline(transaction=False) as pipe:
        for _ in range(_BATCH):
            pipe.xadd("s", {b"d": payload})
        pipe.xreadgroup("g", "c", {"s": ">"}, count=_BATCH)
        *entries, _ = pipe.execute()
        pipe.xack("s", "g", *entries)
        pipe.xdel("s", *entries)
        pipe.execute()


def _measure(replicas: int, num_rollouts: int, tokens: int) -> Record:
    """Rollouts a second, processor time by service, and memory over whole steps, with so many tokens in an answer."""
    steps = max(WARM_STEPS + 2, num_rollouts // STEP_ROLLOUTS)
    model = make_model("model-smallest", hidden_size=32, layers=1, ends=True)  # it is pushed after every step
    path = write_config(
        "pipeline",
        "long-tailed",
        "float32",
        model={"path": str(model)},
        algorithm={
            "rollout_batch_size": GROUPS,
            "num_return_sequences_in_group": GROUP_SIZE,
            "response_length": tokens,
            "num_mini_batches": 1,
        },
        generation={"replicas": replicas, "max_rollouts": 256, "engine": {}},
        reward={"replicas": replicas},
        staleness={"max_lag": MAX_LAG},
        run={"total_steps": steps, "checkpoint_every": 10_000, "keep_log_steps": 8},
    )
    os.environ |= Settings(time_scale=0.0, length_median=tokens, changed_share=1e-3).to_environment()
    figures = asyncio.run(_run(read_config(path), steps))
    return {"what": "pipeline", "replicas": replicas, "tokens": tokens, **figures}


async def _run(config: Config, steps: int) -> Record:
    """Follow the step records to the last one, and count from the first warm one on."""
    samples: list[dict[str, float]] = []
    records: list[dict[str, Any]] = []
    used_s: dict[str, float] = {}
    warm_pids: dict[str, int] = {}
    first, last_change = 0, time.monotonic() + _START_S
    async with running_services(config, *SERVICES, change=simulated) as services:
        while len(records) < steps:
            await asyncio.sleep(_LOOK_S)
            num_before = len(records)
            records = logged(config.run_dir, "metrics.jsonl")
            if len(records) > num_before:
                last_change = time.monotonic()
            elif time.monotonic() > last_change + _STEP_S:
                raise MeasurementError(f"no step for {_STEP_S:g} s after {len(records)} of {steps}")
            pids = {name: child.pid for name, child in services.supervisor.children.items() if child.pid is not None}
            if len(records) >= WARM_STEPS and not first:
                first, warm_pids = len(records), pids
                used_s = {name: processor_s(pid) for name, pid in pids.items()}
            if restarted := [name for name, pid in warm_pids.items() if pids.get(name) != pid]:
                raise MeasurementError(f"{', '.join(restarted)} ended meanwhile: it was disturbed, and has no number")
            mib = {name: sum(p.memory_info().rss for p in process_tree(pid)) / 2**20 for name, pid in pids.items()}
            samples.append({"unix_s": time.time(), "steps": len(records), **mib})
        used_s = {name: processor_s(pid) - used_s[name] for name, pid in pids.items() if name in used_s}
    seconds, num = records[-1]["unix_s"] - records[first - 1]["unix_s"], STEP_ROLLOUTS * (len(records) - first)
    # A process that started later used no memory before.
    memory = pd.DataFrame(samples).fillna(0.0).to_dict("list")
    return {
        "rollouts": num,
        "seconds": seconds,
        "per_s": num / seconds,
        "processor_s": used_s,
        "memory": {"unix_s": memory.pop("unix_s"), "steps": memory.pop("steps"), "mib": memory},
        "step_rollouts": STEP_ROLLOUTS,
    }


def text(results: Results) -> str:
    """Rollouts a second with the processor time of one rollout in each service, and memory at the quarters of a run."""
    frame = pd.DataFrame(results["pipeline"])
    used = pd.DataFrame(frame.get("processor_s", pd.Series()).dropna().to_dict()).T.reindex(frame.index)
    by_service = used.T.groupby(lambda name: name.partition("-")[0]).sum(min_count=1).T
    spent_ms = by_service.div(frame.rollouts, axis=0) * 1e3
    names = [
        f"Redis alone, entries of {row.bytes:,.0f} bytes"
        if row.what == "redis"
        else f"{row.replicas:.0f} of generation and of reward, {row.rollouts:,.0f} rollouts"
        for row in frame.itertuples()
    ]
    memory = pd.DataFrame(longest(results)["memory"]["mib"]).apply(quarters).T
    return _TEXT.format(
        tokens=TOKENS,
        max_lag=MAX_LAG,
        batch=_BATCH,
        rates=table(
            ("", names, ""),
            ("rollouts/s", frame.per_s, ",.0f"),
            *((f"{service}, ms", spent_ms[service], ".2f") for service in (*SERVICES, "redis")),
            ("all, ms", spent_ms.sum(axis=1, min_count=1), ".2f"),
        ),
        memory=table(
            ("", memory.index, ""),
            *((header, memory[place], ".0f") for place, header in enumerate(_QUARTERS)),
            ("growth", memory[3] / memory[0] - 1, ".0%"),
        ),
    )


def longest(results: Results) -> Record:
    """The run with the most rollouts, which has one replica of each service."""
    return max((case for case in results["pipeline"] if case["what"] == "pipeline"), key=lambda case: case["rollouts"])


def quarters(mib: pd.Series[float]) -> pd.Series[float]:
    """Medians before the quarters of a curve and before its end: a single sample says little."""
    width = max(1, len(mib) // 20)
    ends = [max(width, round(len(mib) * part / 4)) for part in (1, 2, 3, 4)]
    return pd.Series([mib[end - width : end].median() for end in ends])


def draw(results: Results, folder: Path) -> None:
    """Memory of every service over the rollouts of the longest run."""
    case = longest(results)
    done = [steps * case["step_rollouts"] for steps in case["memory"]["steps"]]
    with panels(folder / "benchmarks-memory.png", "Does memory stay where it is?", height=3.4) as (axis,):
        frame = pd.DataFrame(case["memory"]["mib"], index=done)
        frame.plot(ax=axis, linewidth=1.4, legend=False, color=[BLUE, ORANGE, GREEN, RED, PURPLE, SKY])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("rollouts trained on")
        axis.set_ylabel("resident memory, MiB")


PIPELINE = PageSection("pipeline", "The pipeline without its engines", measurements, text, (draw,))
