"""Instances on a real Redis: each process is there once, and is forgotten with its heartbeat."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from gspo.common.streams.instances import Instance, Registration, list_instances, wait_for_instance
from gspo.common.streams.keys import Keys
from gspo.common.telemetry.activity import Activity

pytestmark = pytest.mark.asyncio(loop_scope="function")


def registration(redis: Redis, keys: Keys, instance: Instance) -> Registration:
    return Registration(redis, keys, instance, Activity(instance.service), lambda: {"version": 3})


async def test_two_processes_of_one_name_and_process_id_are_two_members(redis: Redis, keys: Keys) -> None:
    first, second = (Instance("generation", "generation-0", grpc=f"host-{n}:1", pid=7) for n in range(2))
    await registration(redis, keys, first).beat()
    await asyncio.sleep(0.01)
    await registration(redis, keys, second).beat()
    await registration(redis, keys, Instance("reward", "reward-0")).beat()
    instances = await list_instances(redis, keys, "generation")
    assert [(instance.uid, instance.grpc) for instance in instances] == [
        (second.uid, "host-1:1"),
        (first.uid, "host-0:1"),
    ]
    assert instances[0].facts == {"version": 3}
    assert len(await list_instances(redis, keys)) == 3
    assert (await wait_for_instance(redis, keys, "generation", 1)).uid == second.uid


async def test_one_that_is_starting_is_seen_and_not_called(redis: Redis, keys: Keys) -> None:
    starting = registration(redis, keys, Instance("generation", "generation-0"))
    await starting.beat()
    assert [instance.name for instance in await list_instances(redis, keys)] == ["generation-0"]
    with pytest.raises(TimeoutError):
        await wait_for_instance(redis, keys, "generation", 0.1)
    await starting.open("host:1", lambda: {"version": 4})
    running = await wait_for_instance(redis, keys, "generation", 1)
    assert (running.grpc, running.facts) == ("host:1", {"version": 4})


async def test_a_member_without_a_heartbeat_is_forgotten_and_comes_back_with_the_next(redis: Redis, keys: Keys) -> None:
    instance = Instance("reward", "reward-0")
    alive = registration(redis, keys, instance)
    await alive.beat()
    await redis.delete(keys.instance("reward", instance.uid))
    assert await list_instances(redis, keys) == []
    assert await redis.scard(keys.instances) == 0
    await alive.beat()
    assert [item.uid for item in await list_instances(redis, keys, "reward")] == [instance.uid]


async def test_a_member_that_ends_leaves(redis: Redis, keys: Keys) -> None:
    task = asyncio.create_task(registration(redis, keys, Instance("reward", "reward-0")).run())
    while not await list_instances(redis, keys):
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await redis.scard(keys.instances) == 0


async def test_a_heartbeat_that_cannot_be_read_is_nobodys(redis: Redis, keys: Keys) -> None:
    for uid, text in (("a", "no heartbeat"), ("b", "[]"), ("c", '{"strange": 1}')):
        await redis.sadd(keys.instances, f"generation:{uid}")
        await redis.set(keys.instance("generation", uid), text)
    assert await list_instances(redis, keys) == []
