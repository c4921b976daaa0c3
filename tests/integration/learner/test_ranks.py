"""The learner as two ranks of one host: through torchrun that it starts itself, fed with scored rollouts, killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from gspo.common.config.schema import Config
from gspo.common.streams.events import Events
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import Event, Finished
from tests.support.service_process import registered, service_process, wait_exit
from tests.support.training.learner_feed import LearnerFeed, lines, run_of

pytestmark = pytest.mark.timeout(400)


def ranks(launcher: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    """The ranks that a launcher started, by number."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def calls_of(process: psutil.Process, port: int) -> int:
    """Connections of a process to a port."""
    return sum(bool(c.raddr) and c.raddr.port == port for c in process.net_connections("tcp"))


async def end(redis: Redis, keys: Keys, feeder: LearnerFeed, process: subprocess.Popen[bytes]) -> None:
    """The coordinator's Finished event, after which all ranks end."""
    assert (await feeder.event("training_done")).training_done.step == 3
    await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
    assert await asyncio.to_thread(wait_exit, process, 60) == 0


def of_two_ranks(tmp_path: Path, zero_stage: int) -> Config:
    return run_of(tmp_path, learner={"ranks": 2, "zero_stage": zero_stage}, run={"checkpoint_every": 1000})


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=pytest.mark.long), 3])
async def test_two_ranks_train_a_run_and_a_killed_one_costs_nothing(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path, zero_stage: int
) -> None:
    config, feeder = of_two_ranks(tmp_path, zero_stage), LearnerFeed(redis, keys)
    with service_process("learner", config, redis_url) as first:
        await registered(first, redis, keys, "learner")
        await feeder.feed(range(4), 0)
        await feeder.event("step_done")
        processes = ranks(first)
        redis_port = int(redis_url.rsplit(":", 1)[1].split("/")[0])
        assert (calls_of(processes[0], redis_port) > 0, calls_of(processes[1], redis_port)) == (True, 0)
        await feeder.feed(range(4, 8), 1)
        await feeder.event("step_done", num=2)
        processes[1].send_signal(signal.SIGKILL)
        assert await asyncio.to_thread(wait_exit, first, 60) != 0
        assert not psutil.pid_exists(processes[0].pid)
    assert "another rank of the learner has ended" in (config.run_dir / "learner.log").read_text()
    recorded = lines(config, "policy.jsonl")
    assert len({line["digest"] for line in recorded}) == 3

    with service_process("learner", config, redis_url, "--resume") as second:
        await feeder.feed(range(8, 12), 2)
        await end(redis, keys, feeder, second)
    # The replay on two ranks made the same bits: no version was recorded anew.
    assert lines(config, "policy.jsonl")[:3] == recorded
    assert [line["step"] for line in lines(config, "metrics.jsonl")] == [1, 2, 3]
    assert (config.run_dir / "checkpoints" / "step-000003" / "manifest.json").is_file()
    assert (config.run_dir / "export" / "model.safetensors").is_file()


def test_a_rank_dies_with_its_launcher() -> None:
    """A rank that outlived it would hold the run directory against the next one."""
    rank = "import time; from gspo.learner.ranks.launcher import end_with_launcher as d; d(); print(flush=True)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank + '; time.sleep(60)'!r}])"
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    (child,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    process.stdout.close()
