"""Our generation service with nothing but Redis beside it: tasks in its stream, tokens counted in the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.sizes import GROUP_SIZE, GROUPS, MAX_TOKENS, NUM_ROLLOUTS, Dtype, Lengths
from benchmarks.harness.workload import prompt_token_ids, write_config
from gspo.cli.processes.programs import Job, service_programs
from gspo.cli.processes.redis_server import LOOPBACK, free_port, redis_program
from gspo.cli.processes.supervisor import ProcessSupervisor
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.loading import write_config as write_whole_config
from gspo.common.config.schema import Config
from gspo.common.service.redis_client import connect_redis
from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.inbox import FIELD, append, create_consumer_groups
from gspo.common.streams.instances import wait_for_instance
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import GroupTask, Prompt, Rollout, Sampling

_START_S, _ROUND_S, _REDIS_S = 240.0, 300.0, 15.0
# Only the number of entries is asked for while the clock runs, so that reading them costs the engine nothing.
_LOOK_EVERY_S = 0.02
T = TypeVar("T")


def measure(lengths: Lengths, dtype: Dtype, rounds: int) -> dict[str, Any]:
    """Seconds and tokens of every round over the prompts; the first one warms up.

    Raises:
        MeasurementError: A process did not start, or a round did not end.
    """
    config = read_config(write_config(f"service-{lengths}-{dtype}", lengths, dtype))
    config.run_dir.mkdir()
    write_whole_config(config, config.run_dir / CONFIG_NAME)
    return asyncio.run(_measure(config, lengths, rounds))


async def _measure(config: Config, lengths: Lengths, rounds: int) -> dict[str, Any]:
    return await beside("generation", config, lambda redis, _: _rounds(redis, Keys(config.name), lengths, rounds))


async def beside(service: str, config: Config, work: Callable[[Redis, str], Coroutine[Any, Any, T]]) -> T:
    """The result of `work(redis, its url)` beside one service and Redis; the run directory is there already.

    Raises:
        Exception: What the work raised, or the death of a process while it lasted.
    """
    port = free_port()
    url = f"redis://{LOOPBACK}:{port}/0"
    redis = connect_redis(url)
    complaints: list[str] = []
    try:
        async with ProcessSupervisor(config.run_dir / "services", 0, complaints.append) as supervisor:
            supervisor.start([redis_program(config, config.run_dir, port)])
            await wait_for_redis(url)
            await create_consumer_groups(redis, Keys(config.name))
            supervisor.start(service_programs(Job(config, config.run_dir, services=(service,)), url))
            # What dies takes the measurement with it instead of letting it wait.
            death = asyncio.create_task(supervisor.watch())
            working = asyncio.create_task(work(redis, url))
            await asyncio.wait({death, working}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                working.cancel()
                death.result()
            death.cancel()
            return working.result()
    finally:
        await redis.aclose()


async def wait_for_redis(url: str) -> None:
    """Wait for a Redis that was just started."""
    probe, deadline = Redis.from_url(url, protocol=2, socket_timeout=1), time.monotonic() + _REDIS_S
    try:
        while time.monotonic() < deadline:
            try:
                await probe.ping()
            except RedisError:
                await asyncio.sleep(0.05)
            else:
                return
    finally:
        await probe.aclose()
    raise MeasurementError(f"redis-server did not answer within {_REDIS_S:g} s")


async def _rounds(redis: Redis, keys: Keys, lengths: Lengths, rounds: int) -> dict[str, Any]:
    began = time.monotonic()
    await wait_for_instance(redis, keys, "generation", _START_S)
    start_s = time.monotonic() - began
    token_ids = prompt_token_ids(lengths, GROUPS)
    return {
        "start_s": start_s,
        "rounds": [await _round(redis, keys, token_ids, lengths, number) for number in range(rounds)],
    }


async def _round(redis: Redis, keys: Keys, prompts: list[list[int]], lengths: Lengths, number: int) -> dict[str, float]:
    tasks = [_task(number * GROUPS + i, ids, lengths) for i, ids in enumerate(prompts)]
    began = time.monotonic()
    await append(redis, keys.prompts, [task.SerializeToString() for task in tasks])
    while await redis.xlen(keys.rollouts) < NUM_ROLLOUTS:
        if time.monotonic() - began > _ROUND_S:
            raise MeasurementError(f"{NUM_ROLLOUTS} rollouts took longer than {_ROUND_S:g} s")
        await asyncio.sleep(_LOOK_EVERY_S)
    seconds = time.monotonic() - began
    entries: Any = await redis.xrange(keys.rollouts)
    await redis.xdel(keys.rollouts, *(entry for entry, _ in entries))
    rollouts = [Rollout.FromString(fields[FIELD]) for _, fields in entries]
    return {"seconds": seconds, "tokens": sum(len(rollout.token_ids) for rollout in rollouts)}


def _task(group: int, token_ids: list[int], lengths: Lengths) -> GroupTask:
    now = time.time()
    return GroupTask(
        schema=SCHEMA,
        group=group,
        attempt=1,
        num_rollouts=GROUP_SIZE,
        prompt=Prompt(token_ids=token_ids),
        sampling=Sampling(temperature=1.0, max_tokens=MAX_TOKENS[lengths]),
        issued_unix_s=now,
        deadline_unix_s=now + _ROUND_S,
    )
