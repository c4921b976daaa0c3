"""Members on a real Redis: each process is there once, under whatever name, and is forgotten with its heartbeat."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from gspo.common.streams.instances import Member, Registration, members, wait_for_member
from gspo.common.streams.keys import Keys
from gspo.common.telemetry.activity import Activity

pytestmark = pytest.mark.asyncio(loop_scope="function")


def registration(redis: Redis, keys: Keys, member: Member) -> Registration:
    return Registration(redis, keys, member, Activity(member.service), lambda: {"version": 3})


async def test_two_processes_of_one_name_and_process_id_are_two_members(redis: Redis, keys: Keys) -> None:
    first, second = (Member("generation", "generation-0", grpc=f"host-{n}:1", pid=7) for n in range(2))
    await registration(redis, keys, first).beat()
    await asyncio.sleep(0.01)
    await registration(redis, keys, second).beat()
    await registration(redis, keys, Member("reward", "reward-0")).beat()
    found = await members(redis, keys, "generation")
    assert [(member.uid, member.grpc) for member in found] == [(second.uid, "host-1:1"), (first.uid, "host-0:1")]
    assert found[0].facts == {"version": 3}
    assert len(await members(redis, keys)) == 3
    assert (await wait_for_member(redis, keys, "generation", 1)).uid == second.uid


async def test_one_that_is_starting_is_seen_and_not_called(redis: Redis, keys: Keys) -> None:
    starting = registration(redis, keys, Member("generation", "generation-0"))
    await starting.beat()
    assert [member.name for member in await members(redis, keys)] == ["generation-0"]
    with pytest.raises(TimeoutError):
        await wait_for_member(redis, keys, "generation", 0.1)
    await starting.open("host:1", lambda: {"version": 4})
    found = await wait_for_member(redis, keys, "generation", 1)
    assert (found.grpc, found.facts) == ("host:1", {"version": 4})


async def test_a_member_without_a_heartbeat_is_forgotten_and_comes_back_with_the_next(redis: Redis, keys: Keys) -> None:
    member = Member("reward", "reward-0")
    alive = registration(redis, keys, member)
    await alive.beat()
    await redis.delete(keys.member("reward", member.uid))
    assert await members(redis, keys) == []
    assert await redis.scard(keys.members) == 0
    await alive.beat()
    assert [found.uid for found in await members(redis, keys, "reward")] == [member.uid]


async def test_a_member_that_ends_leaves(redis: Redis, keys: Keys) -> None:
    task = asyncio.create_task(registration(redis, keys, Member("reward", "reward-0")).run())
    while not await members(redis, keys):
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await redis.scard(keys.members) == 0


async def test_a_heartbeat_that_cannot_be_read_is_nobodys(redis: Redis, keys: Keys) -> None:
    for uid, text in (("a", "no heartbeat"), ("b", "[]"), ("c", '{"strange": 1}')):
        await redis.sadd(keys.members, f"generation:{uid}")
        await redis.set(keys.member("generation", uid), text)
    assert await members(redis, keys) == []
