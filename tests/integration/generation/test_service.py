"""The generation service as a process: tasks in, rollouts out, weights that change or are refused, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from redis.asyncio import Redis
from transformers import AutoModelForCausalLM

from gspo.common.config.schema import Config
from gspo.common.network.grpc_server import open_channel
from gspo.common.streams.events import Events
from gspo.common.streams.inbox import append, create_consumer_groups
from gspo.common.streams.instances import Instance, list_instances, wait_for_instance
from gspo.common.streams.keys import Keys
from gspo.common.streams.redis_client import connect_redis
from gspo.common.streams.saved_states import DONE
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from gspo.learner.push.replicas import GeneratorReplica, PushFailedError
from gspo.learner.push.weight_updates import PackedChanges, WholePolicy, push_header
from gspo_proto.generation_pb2 import (
    DescribeRequest,
    GenerateRequest,
    GeneratorDescription,
    PushResult,
    WeightFrame,
)
from gspo_proto.generation_pb2_grpc import GenerationStub
from gspo_proto.rollout_pb2 import (
    OUTCOME_TRUNCATED,
    Event,
    Finished,
    GroupTask,
    Prompt,
    Rollout,
    RolloutState,
    Sampling,
)
from tests.integration.generation.test_engine import Reference
from tests.support.service_process import assert_on_loopback_alone, make_run, registered, service_process, wait_exit
from tests.support.tiny_model import make_tiny_model
from tests.support.typed.redis_entries import payloads, stream_entries

if TYPE_CHECKING:
    from gspo_proto.generation_pb2_grpc import GenerationAsyncStub

pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True)
class RunningGenerator:
    config: Config
    redis: Redis
    keys: Keys
    instance: Instance
    stub: GenerationAsyncStub
    policy: PolicyWeights
    process: subprocess.Popen[bytes]


def policy_of(folder: Path, version: int, *, scale: float = 1.0) -> PolicyWeights:
    """The policy of a model folder, its norms scaled."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {n: p.detach() * (scale if "norm" in n else 1.0) for n, p in model.named_parameters()}
    return weights_from(version, {name: tensor.contiguous() for name, tensor in tensors.items()})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGenerator]:
    folder = tmp_path_factory.mktemp("generation")
    config = make_run(
        folder,
        make_tiny_model(folder / "model", scale=4.0),
        algorithm={"response_length": 384},
        # Two threads: OpenMP's were never started before the engine's process was forked.
        generation={"save_tokens": 32, "threads": 2, "checksums_every": 1},
        services={"lease_s": 6},
    )
    keys = Keys(config.name)
    redis = connect_redis(redis_url)
    await redis.flushall()
    await create_consumer_groups(redis, keys)
    with service_process("generation", config, redis_url) as process:
        instance = await registered(process, redis, keys, "generation")
        channel = open_channel(instance.grpc)
        policy = policy_of(folder / "model", 0)
        yield RunningGenerator(config, redis, keys, instance, GenerationStub(channel), policy, process)
        await channel.close(None)
    await redis.aclose()


def task(group: int, *, num_rollouts: int = 4, max_tokens: int = 8, min_version: int = 0) -> GroupTask:
    return GroupTask(
        schema=1,
        group=group,
        attempt=1,
        num_rollouts=num_rollouts,
        prompt=Prompt(token_ids=[1, 4, 50, 5], text="prompt", columns_json='{"answer": "3"}'),
        sampling=Sampling(temperature=1.0, max_tokens=max_tokens),
        min_version=min_version,
    )


async def rollouts(running: RunningGenerator, num: int, timeout_s: float = 60) -> list[Rollout]:
    """The first `num` entries of rollouts, which are then removed."""
    deadline = time.monotonic() + timeout_s
    while await running.redis.xlen(running.keys.rollouts) < num:
        assert time.monotonic() < deadline, f"{await running.redis.xlen(running.keys.rollouts)} of {num} rollouts"
        await asyncio.sleep(0.02)
    entries = await stream_entries(running.redis, running.keys.rollouts)
    await running.redis.xdel(running.keys.rollouts, *(entry for entry, _ in entries))
    return [Rollout.FromString(fields[b"d"]) for _, fields in entries]


async def push(
    running: RunningGenerator, policy: PolicyWeights, base: PolicyWeights | None = None, epoch: int = 1
) -> PushResult:
    update = PackedChanges(policy, base) if base else WholePolicy(policy)
    header = push_header(update.target, update.base, run=running.config.name, epoch=epoch, learner="")
    async with open_channel(running.instance.grpc) as channel:
        replica = GeneratorReplica(running.instance, channel, ())
        result, _ = await replica.push(header, aiter(update), limit_s=60, on_sent=lambda: None)
    return result


async def describe(running: RunningGenerator) -> GeneratorDescription:
    return await running.stub.Describe(DescribeRequest(), timeout=10)


async def test_the_engine_is_forked_from_the_service(running: RunningGenerator) -> None:
    assert "engine_not_forked" not in (running.config.run_dir / "generation.log").read_text()
    # A spawned engine comes with multiprocessing's resource tracker.
    (engine,) = psutil.Process(running.process.pid).children()
    assert engine.num_threads() > 2


async def test_a_task_becomes_its_rollouts_and_is_acknowledged(running: RunningGenerator) -> None:
    await append(running.redis, running.keys.prompts, [task(7).SerializeToString()])
    finished = await rollouts(running, 4)
    assert sorted((rollout.group, rollout.number) for rollout in finished) == [(7, 0), (7, 1), (7, 2), (7, 3)]
    for rollout in finished:
        assert len(rollout.token_ids) == len(rollout.logp) == len(rollout.version) == len(rollout.mask) > 0
        assert set(rollout.version) == {0}
        assert all(logp <= 0 for logp in rollout.logp)
        assert rollout.prompt.columns_json == '{"answer": "3"}'
        assert (rollout.outcome == OUTCOME_TRUNCATED) == (len(rollout.token_ids) == 8 and rollout.token_ids[-1] != 2)
    async with asyncio.timeout(30):  # it is acknowledged after its last rollout
        while await running.redis.xlen(running.keys.prompts):
            await asyncio.sleep(0.01)


async def test_a_rollout_that_an_earlier_attempt_finished_is_not_made_again(running: RunningGenerator) -> None:
    await running.redis.hset(running.keys.partial, "8-1", "done")
    await append(running.redis, running.keys.prompts, [task(8).SerializeToString()])
    assert sorted(rollout.number for rollout in await rollouts(running, 3)) == [0, 2, 3]


async def test_the_heartbeat_has_the_digest_of_the_folder(running: RunningGenerator) -> None:
    instance = await wait_for_instance(running.redis, running.keys, "generation", 5)
    assert (instance.facts["version"], instance.facts["digest"]) == (0, running.policy.digest)


async def test_every_server_is_on_loopback_alone(running: RunningGenerator) -> None:
    """vLLM's own among them."""
    instance = await wait_for_instance(running.redis, running.keys, "generation", 5)
    assert_on_loopback_alone(running.process.pid, instance.http, instance.grpc)


async def test_generate_streams_rollouts(running: RunningGenerator) -> None:
    finished = [r async for r in running.stub.Generate(GenerateRequest(task=task(9, num_rollouts=3)), timeout=60)]
    assert sorted(rollout.number for rollout in finished) == [0, 1, 2]


async def test_pushes_take_hold_or_change_nothing(running: RunningGenerator) -> None:
    model = Path(running.config.model.path)
    first, second = policy_of(model, 1, scale=1.1), policy_of(model, 2, scale=1.2)
    assert (await push(running, first)).digest == first.digest

    # Changes only; the tensors that did not change are not sent.
    frames = [WeightFrame.FromString(frame) async for frame in PackedChanges(second, first)]
    assert {run.name for frame in frames for run in frame.tensors} == {name for name in second.bits if "norm" in name}
    assert (await push(running, second, base=first)).version == 2

    with pytest.raises(PushFailedError) as wrong_base:
        await push(running, policy_of(model, 3), base=first)
    assert wrong_base.value.status == grpc.StatusCode.FAILED_PRECONDITION
    broken = replace(second, version=4, digest="lin64:" + 64 * "0")
    with pytest.raises(PushFailedError) as wrong_digest:
        await push(running, broken)
    assert wrong_digest.value.status == grpc.StatusCode.DATA_LOSS
    await push(running, second, epoch=5)
    with pytest.raises(PushFailedError) as old_epoch:
        await push(running, first, epoch=4)
    assert old_epoch.value.status == grpc.StatusCode.PERMISSION_DENIED
    now = await describe(running)
    assert (now.version, now.digest, now.epoch) == (2, second.digest, 5)


async def test_a_push_with_rollouts_in_flight_loses_none(running: RunningGenerator) -> None:
    version = (await describe(running)).version
    # Made before the tasks, whose rollouts are long enough that half of them are met in flight.
    newest = policy_of(Path(running.config.model.path), version + 1, scale=1.3)
    tasks = [task(100 + n, max_tokens=200, num_rollouts=8).SerializeToString() for n in range(8)]
    await append(running.redis, running.keys.prompts, tasks)
    while (await describe(running)).num_running < 32:
        await asyncio.sleep(0.01)
    await push(running, newest, epoch=5)
    finished = await rollouts(running, 64)
    assert len({(rollout.group, rollout.number) for rollout in finished}) == 64
    seen = {v for rollout in finished for v in rollout.version}
    assert seen <= {version, version + 1} and version + 1 in seen
    assert all(list(rollout.version) == sorted(rollout.version) for rollout in finished)


async def test_a_task_for_newer_weights_waits_for_the_push(running: RunningGenerator) -> None:
    version = (await describe(running)).version
    await append(running.redis, running.keys.prompts, [task(200, min_version=version + 1).SerializeToString()])
    await asyncio.sleep(1)
    assert await running.redis.xlen(running.keys.rollouts) == 0
    await push(running, policy_of(Path(running.config.model.path), version + 1, scale=1.4), epoch=5)
    assert {v for rollout in await rollouts(running, 4) for v in rollout.version} == {version + 1}


async def test_all_groups_of_a_killed_generator_are_taken_over_at_once(running: RunningGenerator) -> None:
    """A generator takes over as many tasks as fit when leases end; one task at each renewal would take minutes."""
    async with running.redis.pipeline(transaction=True) as pipe:
        for group in range(400, 408):
            pipe.xadd(running.keys.prompts, {b"d": task(group).SerializeToString()})
        pipe.xreadgroup("generation", "killed", {running.keys.prompts: ">"}, count=8)
        *entries, _ = await pipe.execute()
    lease_s = running.config.services.lease_s
    await running.redis.xclaim(
        running.keys.prompts, "generation", "killed", 0, entries, idle=round(1000 * lease_s) + 1, justid=True
    )
    # Leases are renewed five times within it, and one task at each renewal would leave three.
    finished = await rollouts(running, 32, timeout_s=5 / 3 * lease_s)
    assert {rollout.group for rollout in finished} == set(range(400, 408))


@pytest.mark.long
async def test_a_killed_generator_costs_what_it_had_not_saved(running: RunningGenerator, redis_url: str) -> None:
    """A second process takes the task, while the first one stands still, and is killed in the middle of it."""
    redis, keys, process = running.redis, running.keys, running.process
    policy = policy_of(Path(running.config.model.path), (await describe(running)).version + 1, scale=1.4)
    pushed = await push(running, policy, epoch=5)
    with service_process("generation", running.config, redis_url, "--name", "doomed") as doomed:
        instance = await named(doomed, redis, keys, "doomed")
        again = await push(replace(running, instance=instance), policy, epoch=5)
        assert again.checksum == pushed.checksum != ""
        os.kill(process.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.3)  # a read that it has begun is over by now
            saved = await saved_states(running)
        finally:
            os.killpg(doomed.pid, signal.SIGKILL)
            os.kill(process.pid, signal.SIGCONT)
    by_number = {rollout.number: rollout for rollout in await rollouts(running, LONG_GROUP_SIZE)}
    assert sorted(by_number) == list(range(LONG_GROUP_SIZE))
    assert any(by_number[number].generator != "doomed" for number in saved)
    for number, state in saved.items():
        rollout, kept = by_number[number], len(state.token_ids)
        assert kept >= running.config.generation.save_tokens // 2
        assert list(rollout.token_ids[:kept]) == list(state.token_ids)
        assert list(rollout.logp[:kept]) == list(state.logp)
        assert list(rollout.version[:kept]) == list(state.version) == [policy.version] * kept
    model = AutoModelForCausalLM.from_pretrained(running.config.model.path, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.data *= 1.4 if "norm" in name else 1.0
    for rollout in by_number.values():
        assert len(rollout.token_ids) == len(rollout.logp) == len(rollout.version) == len(rollout.mask)
        expected = Reference(model).logp(list(rollout.prompt.token_ids), list(rollout.token_ids), temperature=1.0)
        assert np.abs(np.array(rollout.logp) - expected).max() < 1e-3


async def named(process: subprocess.Popen[bytes], redis: Redis, keys: Keys, name: str) -> Instance:
    """A further generator's instance, once its engine serves."""
    while True:
        assert process.poll() is None, f"{name} ended before it registered"
        instances = await list_instances(redis, keys, "generation")
        if started := [instance for instance in instances if instance.name == name and instance.grpc]:
            return started[0]
        await asyncio.sleep(0.1)


LONG_GROUP_SIZE = 8


async def saved_states(running: RunningGenerator) -> dict[int, RolloutState]:
    """The saved states of a group in flight, once two or more of its rollouts have tokens.

    A fast machine may finish a group before a second rollout is saved; then another group follows.
    """
    for group in range(500, 520):
        long_task = task(group, max_tokens=384, num_rollouts=LONG_GROUP_SIZE)
        await append(running.redis, running.keys.prompts, [long_task.SerializeToString()])
        while await running.redis.xlen(running.keys.rollouts) < LONG_GROUP_SIZE:
            saved: Any = await running.redis.hgetall(running.keys.partial)
            states = {
                int(rollout_key.decode().partition("-")[2]): RolloutState.FromString(state)
                for rollout_key, state in saved.items()
                if rollout_key.startswith(f"{group}-".encode()) and state != DONE
            }
            if len(states) > 1:
                return states
            await asyncio.sleep(0.005)
        await rollouts(running, LONG_GROUP_SIZE)
    raise AssertionError("20 groups of long answers ended, and no two rollouts of any were saved")


async def test_a_prompt_that_the_engine_refuses_fails_its_group_with_the_reason(running: RunningGenerator) -> None:
    refused = task(300)
    refused.prompt.token_ids[:] = [4] * 500
    await append(running.redis, running.keys.prompts, [refused.SerializeToString()])
    while not (scored := await payloads(running.redis, running.keys.scored)):
        await asyncio.sleep(0.05)
    assert b"generation: request" in scored[0]
    assert await running.redis.xlen(running.keys.dead) == 1


async def test_the_end_of_the_run_ends_the_service(running: RunningGenerator) -> None:
    await Events(running.redis, running.keys, "coordinator").send(Event(finished=Finished(reason="done")))
    assert await asyncio.to_thread(wait_exit, running.process, 30) == 0
