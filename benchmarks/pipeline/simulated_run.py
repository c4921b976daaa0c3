"""Everything of a run but its engine and its training step: how many rollouts a second pass, and what memory it takes.

The engine and the step are simulated and take no time; coordinator, Redis, generation, reward with its sandbox,
assembly, log and push are the real services.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.child_process import MeasurementError, run_child
from benchmarks.harness.single_service import wait_for_redis
from benchmarks.harness.sizes import CACHE
from benchmarks.harness.workload import write_config
from benchmarks.simulated.run import simulated
from benchmarks.simulated.settings import Settings
from gspo.cli.processes.programs import Job, service_programs
from gspo.cli.processes.redis_server import LOOPBACK, free_port, redis_program
from gspo.cli.processes.supervisor import ProcessSupervisor, Program
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.loading import write_config as write_whole_config
from gspo.common.config.schema import Config

GROUPS, GROUP_SIZE = 64, 8
STEP_ROLLOUTS = GROUPS * GROUP_SIZE
# Batches enough under way that no station waits for another's: what is measured is work, not a round's length.
MAX_LAG = 4
# The first steps fill the pipeline.
WARM_STEPS = 4
_START_S, _STEP_S, _LOOK_S = 120.0, 60.0, 0.25
_MIB = 2**20


@dataclass
class ProcessSamples:
    """What is noted while the run lasts: MiB of each process by name at each look, and processor time."""

    unix_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    mib: dict[str, list[float]] = field(default_factory=dict)


def measure(replicas: int, num_rollouts: int, tokens: int) -> dict[str, Any]:
    """Rollouts a second, processor time by service, and memory over the run.

    Args:
        replicas: Of generation and of reward.
        num_rollouts: In all, whole steps of STEP_ROLLOUTS.
        tokens: In each answer.

    Raises:
        MeasurementError: The run did not come to its end.
    """
    steps = max(WARM_STEPS + 2, num_rollouts // STEP_ROLLOUTS)
    config = _config(replicas, steps, tokens)
    os.environ |= Settings(time_scale=0.0, length_median=tokens, changed_share=1e-3).to_environment()
    return asyncio.run(_run(config, replicas, steps, tokens))


def _config(replicas: int, steps: int, tokens: int) -> Config:
    path = write_config(
        "pipeline",
        "long-tailed",
        "float32",
        model={"path": str(_model())},
        algorithm={
            "rollout_batch_size": GROUPS,
            "num_return_sequences_in_group": GROUP_SIZE,
            "response_length": tokens,
            "num_mini_batches": 1,
        },
        generation={"replicas": replicas, "max_rollouts": 256, "engine": {}},
        staleness={"max_lag": MAX_LAG},
        run={"directory": ".", "total_steps": steps, "checkpoint_every": 10_000, "keep_log_steps": 8},
    )
    config = read_config(path)
    config.run_dir.mkdir()
    write_whole_config(config, config.run_dir / CONFIG_NAME)
    return config


def _model() -> Path:
    """A model as small as one can be: its weights are pushed after every step."""
    folder = CACHE / "model-smallest"
    if not folder.exists():
        run_child(
            "harness.model_writer",
            {"folder": str(folder), "hidden_size": 32, "layers": 1, "ends": True},
            timeout_s=120.0,
        )
    return folder


def _programs(config: Config, replicas: int, redis_url: str) -> Iterator[Program]:
    for program in service_programs(Job(config, config.run_dir), redis_url):
        yield simulated(program)
        if program.name == "reward-0":
            for number in range(1, replicas):
                name = f"reward-{number}"
                words = tuple(name if word == program.name else word for word in program.command)
                yield replace(program, name=name, command=words)


async def _run(config: Config, replicas: int, steps: int, tokens: int) -> dict[str, Any]:
    complaints: list[str] = []
    async with ProcessSupervisor(config.run_dir / "services", 0, complaints.append) as supervisor:
        port = free_port()
        url = f"redis://{LOOPBACK}:{port}/0"
        supervisor.start([redis_program(config, config.run_dir, port)])
        await wait_for_redis(url)
        supervisor.start(list(_programs(config, replicas, url)))
        death = asyncio.create_task(supervisor.watch())
        looking = asyncio.create_task(_look(config, supervisor, steps))
        await asyncio.wait({death, looking}, return_when=asyncio.FIRST_COMPLETED)
        if not looking.done():
            looking.cancel()
            death.result()
        death.cancel()
        return {"what": "pipeline", "replicas": replicas, "tokens": tokens, **looking.result()}


async def _look(config: Config, supervisor: ProcessSupervisor, steps: int) -> dict[str, Any]:
    """Follow the step records to the last one; what happened between the warm one and that."""
    seen, path = ProcessSamples(), config.run_dir / "log/metrics.jsonl"
    began_at: dict[str, float] = {}
    records: list[dict[str, Any]] = []
    last_change = time.monotonic() + _START_S
    while len(records) < steps:
        await asyncio.sleep(_LOOK_S)
        num_before = len(records)
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if len(records) > num_before:
            last_change = time.monotonic()
        elif time.monotonic() > last_change + _STEP_S:
            raise MeasurementError(f"no step for {_STEP_S:g} s after {len(records)} of {steps}")
        processes = {name: child.pid for name, child in supervisor.children.items() if child.pid is not None}
        if len(records) >= WARM_STEPS and not began_at:
            began_at = {name: processor_s(pid) for name, pid in processes.items()}
            first = len(records)
        _note(seen, processes, len(records))
    used = {name: processor_s(pid) - began_at[name] for name, pid in processes.items() if name in began_at}
    seconds = records[-1]["unix_s"] - records[first - 1]["unix_s"]
    num = STEP_ROLLOUTS * (len(records) - first)
    return {
        "rollouts": num,
        "seconds": seconds,
        "per_s": num / seconds,
        "processor_s": used,
        "memory": {"unix_s": seen.unix_s, "steps": seen.steps, "mib": seen.mib},
        "step_rollouts": STEP_ROLLOUTS,
    }


def _note(seen: ProcessSamples, processes: dict[str, int], step: int) -> None:
    seen.unix_s.append(time.time())
    seen.steps.append(step)
    for name, pid in processes.items():
        mib = sum(process.memory_info().rss for process in family(pid)) / _MIB
        # A process that came later has no past.
        seen.mib.setdefault(name, [0.0] * (len(seen.steps) - 1)).append(mib)


def processor_s(pid: int) -> float:
    """Processor time of a process and what it started, the ended ones among them."""
    total = 0.0
    for process in family(pid):
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it, as far as they live."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
