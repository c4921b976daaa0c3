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
from safetensors.torch import load_file

from gspo.common.config.algorithm import LossConfig
from gspo.common.config.schema import Config
from gspo.common.errors import EXIT_START_AGAIN
from gspo.common.streams.events import Events
from gspo.common.streams.gpu_engines import GpuEngine, GpuEngines
from gspo.common.streams.gpu_shift import GpuShift
from gspo.common.streams.keys import Keys
from gspo.learner.storage.step_log import StepLog
from gspo.learner.training.trainer import Trainer
from gspo.runlog.run_log import RunLog
from gspo_proto.rollout_pb2 import Event, Finished
from tests.support.push_peers import PushTarget, generator
from tests.support.service_process import log_events, registered, service_process, wait_exit
from tests.support.training.learner_feed import LearnerFeed, lines, run_of
from tests.support.training.rollout_rows import train

pytestmark = pytest.mark.timeout(400)
# Its figure is 1 where the run's copy of the file is what runs.
OWN_LOSS = """
def loss(batch):
    l_BT = -batch.advantage_BT * batch.logp_BT
    return l_BT, {"kept": (l_BT * 0).detach() + __file__.endswith("/loss.py")}
"""

# On rank 1, micro-batches of more than two rollouts fail in the forward pass, of two in the backward pass, and those of
# one fail once, in the optimizer. Not in the trial of the file, which has no ranks.
SMALL_DEVICE_LOSS = """
from pathlib import Path
import torch
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_pre_hook

def fail(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

def fail_once(*_):
    before = Path(__file__).with_name("optimizer-failed")
    if not before.exists():
        before.touch()
        fail()

def loss(batch):
    if distributed.is_initialized() and distributed.get_rank() == 1 and batch.logp_BT.requires_grad:
        if len(batch.logp_BT) > 2:
            fail()
        elif len(batch.logp_BT) == 2:
            batch.logp_BT.register_hook(fail)
        else:
            register_optimizer_step_pre_hook(fail_once)
    return -batch.advantage_BT * batch.logp_BT
"""


def ranks(launcher: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    """The ranks that a launcher started, by number."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def calls_of(process: psutil.Process, port: int) -> int:
    """Connections of a process to a port."""
    return sum(bool(c.raddr) and c.raddr.port == port for c in process.net_connections("tcp"))


async def end(redis: Redis, keys: Keys, feeder: LearnerFeed, process: subprocess.Popen[bytes], step: int = 3) -> None:
    """The coordinator's Finished event after the last step, at which all ranks end."""
    assert (await feeder.event("training_done", timeout_s=120)).training_done.step == step
    await Events(redis, keys, "coordinator").send(Event(finished=Finished(reason="done")))
    assert await asyncio.to_thread(wait_exit, process, 60) == 0


async def until_served(serving: PushTarget, config: Config, version: int) -> None:
    async with asyncio.timeout(120):
        while serving.serves not in [(version, it["digest"]) for it in lines(config, "policy.jsonl")]:
            await asyncio.sleep(0.05)


def of_two_ranks(tmp_path: Path, zero_stage: int, loss: str = OWN_LOSS) -> Config:
    path = tmp_path / "mine.py"
    path.write_text(loss)
    learner = {"ranks": 2, "zero_stage": zero_stage}
    return run_of(tmp_path, algorithm={"loss": {"path": str(path)}}, learner=learner, run={"checkpoint_every": 1000})


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=pytest.mark.long), 3])
async def test_two_ranks_train_a_run_and_a_killed_one_costs_nothing(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path, zero_stage: int
) -> None:
    """Each rank sends the generator what it owns."""
    config = of_two_ranks(tmp_path, zero_stage)
    async with generator(config, redis_url, model=Path(config.model.path)) as serving:
        await train_and_kill(config, redis, keys, redis_url, serving)
    assert {len(header.sources) for header in serving.headers} == {1}


async def train_and_kill(config: Config, redis: Redis, keys: Keys, redis_url: str, serving: PushTarget) -> None:
    feeder = LearnerFeed(redis, keys)
    with service_process("learner", config, redis_url) as first:
        await registered(first, redis, keys, "learner")
        await feeder.feed(range(4), 0)
        await feeder.event("step_done")
        processes = ranks(first)
        redis_port = int(redis_url.rsplit(":", 1)[1].split("/")[0])
        assert (calls_of(processes[0], redis_port) > 0, calls_of(processes[1], redis_port)) == (True, 0)
        await feeder.feed(range(4, 8), 1)
        await feeder.event("step_done", num=2)
        await until_served(serving, config, 2)
        processes[1].send_signal(signal.SIGKILL)
        assert await asyncio.to_thread(wait_exit, first, 60) != 0
        assert not psutil.pid_exists(processes[0].pid)
    assert "another rank of the learner has ended" in (config.run_dir / "learner.log").read_text()
    recorded = lines(config, "policy.jsonl")
    assert len({line["digest"] for line in recorded}) == 3

    with service_process("learner", config, redis_url, "--resume") as second:
        await feeder.feed(range(8, 12), 2)
        await until_served(serving, config, 3)
        await end(redis, keys, feeder, second)
    # The replay on two ranks made the same bits: no version was recorded anew.
    assert lines(config, "policy.jsonl")[:3] == recorded
    trained = lines(config, "metrics.jsonl")
    assert [line["step"] for line in trained] == [1, 2, 3]
    assert [line["figures"]["loss_kept_mean"] for line in trained] == [1, 1, 1]
    assert (config.run_dir / "checkpoints" / "step-000003" / "manifest.json").is_file()
    assert (config.run_dir / "export" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.parametrize("zero_stage", [0, 3])
async def test_all_ranks_end_and_start_again_when_one_of_them_runs_out_of_memory(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path, zero_stage: int
) -> None:
    """In each part of a mini-batch; its four rollouts of a rank have 9, 8, 7 and 6 positions."""
    config, feeder = of_two_ranks(tmp_path, zero_stage, SMALL_DEVICE_LOSS), LearnerFeed(redis, keys)
    await feeder.feed(range(4), 0)
    for options in ((), ("--resume",), ("--resume",)):
        with service_process("learner", config, redis_url, *options) as process:
            assert await asyncio.to_thread(wait_exit, process, 180) == EXIT_START_AGAIN
    with service_process("learner", config, redis_url, "--resume") as process:
        await feeder.feed(range(4, 8), 1)
        await feeder.event("step_done", timeout_s=180)
        await feeder.feed(range(8, 12), 2)
        await end(redis, keys, feeder, process)
    happened = [(it.rank, it.used_tokens, it.micro_batch_tokens) for it in RunLog(config.run_dir).shortages()]
    assert happened == [(1, 30, 15), (1, 15, 9), (1, 9, 9)]
    used = {line["version"]: line["hyperparameters"] for line in lines(config, "policy.jsonl")}
    assert [(used[step]["micro_batch_tokens"], used[step]["gradient_checkpointing"]) for step in (1, 2, 3)] == [
        (9, True)
    ] * 3
    reasons = [event["reason"] for event in log_events(config.run_dir / "learner.log") if "reason" in event]
    assert sum("step 1 ran out of memory on rank 1 with a micro-batch of 30 tokens" in it for it in reasons) >= 2
    # One rank that has the memory, and takes whole mini-batches, makes the same weights.
    alone = config.with_keys(
        learner={"ranks": 1, "zero_stage": 0}, algorithm={"loss": LossConfig(path=tmp_path / "l.py")}
    )
    (tmp_path / "l.py").write_text(OWN_LOSS)
    trainer, steplog = Trainer(alone, Path(config.model.path)), StepLog(config.run_dir / "log")
    for step in (1, 2, 3):
        train(trainer, step, steplog.read(step))
    exported = load_file(config.run_dir / "export" / "model.safetensors")
    for name, tensor in trainer.engine.policy().items():
        assert (exported[name] - tensor).norm() < 1e-4 * tensor.norm(), name


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="function")
async def test_on_shared_gpus_ranks_wait_while_generators_fall_asleep_and_move_their_states(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    """Rank zero alone waits for generators. The others wait for it, longer than for a rank that trains."""
    rank_timeout_s = 12.0
    learner = {"ranks": 2, "zero_stage": 2, "rank_timeout_s": rank_timeout_s}
    config = run_of(tmp_path, placement="shared", staleness={"max_lag": 0}, learner=learner, run={"total_steps": 2})
    engines, feeder = GpuEngines(redis, keys), LearnerFeed(redis, keys)
    await engines.keep("uid", GpuEngine("generation-0", "node-1", is_supervised=True))
    with service_process("learner", config, redis_url) as process:
        while len(ranks(process)) < 2 or not await GpuShift(redis, keys).read():
            assert process.poll() is None
            await asyncio.sleep(0.2)
        await asyncio.sleep(rank_timeout_s + 6.0)
        await engines.forget("uid")
        await registered(process, redis, keys, "learner")
        for step in (1, 2):
            await feeder.feed(range(4 * step - 4, 4 * step), step - 1)
            await feeder.event("step_done", num=step)
        await end(redis, keys, feeder, process, 2)
    moves = [event for event in log_events(config.run_dir / "learner.log") if event["event"] == "states_in_host_memory"]
    # After the loading, after each step but the last, and at the end, by each rank.
    assert [move.get("rank", 0) for move in moves].count(0) == [move.get("rank") for move in moves].count(1) == 3


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
