"""Commands that Redis carries out while their reply is lost: nothing is lost with it, and nothing done twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from gspo.common.streams.inbox import Delivery, EntryOutput, EntryState, Inbox, append
from gspo.common.streams.keys import GATEWAY, Keys
from gspo.common.streams.redis_client import connect_redis
from gspo.common.streams.token_counts import read_counts
from gspo.gateway.sessions.session_store import SessionStore
from gspo_proto.agent_pb2 import TurnBegin, TurnEnd, TurnEntry, TurnTokens
from gspo_proto.rollout_pb2 import GroupTask, Prompt
from tests.integration.stalls.lossy_redis import LossyRedis
from tests.support.typed.redis_entries import payloads, stream_entries

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(30)]
LONG_S, SHORT_S = 60.0, 0.2


@pytest_asyncio.fixture(loop_scope="function")
async def lossy(redis_url: str) -> AsyncIterator[LossyRedis]:
    async with LossyRedis(redis_url).serve() as proxy:
        yield proxy


@pytest_asyncio.fixture(loop_scope="function")
async def client(lossy: LossyRedis) -> AsyncIterator[Redis]:
    redis = connect_redis(lossy.url)
    yield redis
    await redis.aclose()


def inbox(redis: Redis, keys: Keys, lease_s: float = LONG_S, consumer: str = "learner") -> Inbox:
    return Inbox(redis, keys, keys.prompts, consumer=consumer, lease_s=lease_s)


async def issue(redis: Redis, keys: Keys, *groups: int) -> None:
    prompt = Prompt(token_ids=[1])
    tasks = [GroupTask(schema=1, group=group, num_rollouts=1, prompt=prompt) for group in groups]
    await append(redis, keys.prompts, [task.SerializeToString() for task in tasks])


async def take_all(worker: Inbox, num: int, at_a_time: int = 256) -> list[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(10):
        while len(taken) < num:
            taken += await worker.take(at_a_time, block_s=0.05)
    return taken


def groups_of(taken: list[Delivery]) -> list[tuple[int, int]]:
    return sorted((delivery.message.group, delivery.num_deliveries) for delivery in taken)


@pytest.mark.parametrize("at_a_time", [2, 256])
async def test_entries_of_a_lost_reply_are_taken_again_at_once_and_others_are_not(
    redis: Redis, keys: Keys, lossy: LossyRedis, client: Redis, at_a_time: int
) -> None:
    worker = inbox(client, keys)
    await issue(redis, keys, 1, 2)
    earlier = await take_all(worker, 2)
    assert await worker.finish(earlier[0])
    await issue(redis, keys, 3, 4, 5, 6, 7)
    lossy.lose_reply_to(b"XREADGROUP")
    taken = await take_all(worker, 5, at_a_time)
    assert (groups_of(taken), lossy.num_lost) == ([(group, 1) for group in range(3, 8)], 1)
    assert await worker.take(256, block_s=0.05) == []
    # Each is leased under the number that it came with.
    assert all([await worker.finish(delivery) for delivery in [earlier[1], *taken]])


async def test_the_reply_of_a_take_over_is_not_lost(redis: Redis, keys: Keys, lossy: LossyRedis, client: Redis) -> None:
    await issue(redis, keys, 1, 2)
    await take_all(inbox(redis, keys, consumer="dead"), 2)
    await asyncio.sleep(SHORT_S)
    lossy.lose_reply_to(b"XAUTOCLAIM")
    worker = inbox(client, keys, SHORT_S)
    assert await worker.reclaim(10) == []
    assert groups_of(await take_all(worker, 2)) == [(1, 2), (2, 2)]


async def test_a_lost_reply_that_no_connection_shows_is_found_within_a_lease(redis: Redis, keys: Keys) -> None:
    worker = inbox(redis, keys, SHORT_S)
    await issue(redis, keys, 1, 2)
    (earlier,) = await worker.take(1, block_s=0)
    # As if Redis had answered this consumer on a connection that it has given up.
    await redis.xreadgroup("generation", "learner", {keys.prompts: ">"})
    assert groups_of(await take_all(worker, 1)) == [(2, 1)]
    assert await worker.renew([earlier]) == {earlier.entry}


async def test_what_another_consumer_took_over_meanwhile_is_left_to_it(
    redis: Redis, keys: Keys, lossy: LossyRedis, client: Redis
) -> None:
    await issue(redis, keys, 1)
    lossy.lose_reply_to(b"XREADGROUP")
    worker = inbox(client, keys)
    assert await worker.take(1, block_s=0) == []
    (stolen,) = await redis.xclaim(
        keys.prompts, "generation", "other", 0, [(await stream_entries(redis, keys.prompts))[0][0]]
    )
    assert stolen
    assert await worker.take(1, block_s=0.05) == []


async def test_writes_that_are_repeated_after_a_lost_reply_are_made_once(
    redis: Redis, keys: Keys, lossy: LossyRedis, client: Redis
) -> None:
    worker = inbox(client, keys)
    await issue(redis, keys, *range(4))
    put, requeued, finished, dead = await take_all(worker, 4)
    lossy.lose_reply_to(b"EVALSHA")
    assert await worker.save([EntryState(put, "0:0", b"state")]) == 1
    lossy.lose_reply_to(b"EVALSHA")
    assert await worker.put([EntryOutput(put, keys.rollouts, b"put", "0:0")]) == [True]
    lossy.lose_reply_to(b"EVALSHA")
    assert await worker.renew([put]) == {put.entry}
    for write in (
        worker.finish(put),
        worker.requeue(requeued),
        worker.finish_many(keys.rollouts, [(finished, b"finished")]),
        worker.dead_letter(dead, "hopeless", [(keys.scored, b"failed")]),
    ):
        lossy.lose_reply_to(b"EVALSHA")
        await write
    assert lossy.num_lost == 7
    assert await payloads(redis, keys.rollouts) == [b"put", b"finished"]
    assert [await redis.xlen(stream) for stream in (keys.scored, keys.dead, keys.prompts)] == [1, 1, 1]
    assert groups_of(await take_all(worker, 1)) == [(requeued.message.group, 1)]


async def test_a_worker_gets_one_rollout_for_a_lease_whose_reply_is_lost(
    redis: Redis, keys: Keys, lossy: LossyRedis, client: Redis
) -> None:
    await redis.hset(keys.open, "7", "{}")
    store = SessionStore(client, keys, LONG_S, "one")
    for number in (0, 1):
        await store.open(GroupTask(group=7, num_rollouts=2), number, 100)
    lossy.lose_reply_to(b"EVALSHA")
    sessions = [await store.lease("worker") for _ in range(3)]
    assert lossy.num_lost == 1
    assert [session and session.number for session in sessions] == [0, 1, None]


async def test_an_answer_has_each_token_once_and_its_budget_is_spent_once(
    redis: Redis, keys: Keys, lossy: LossyRedis, client: Redis
) -> None:
    await redis.hset(keys.open, "7", "{}")
    await redis.set(keys.instance(GATEWAY, "one"), "{}")
    store = SessionStore(client, keys, LONG_S, "one")
    await store.open(GroupTask(group=7, num_rollouts=1), 0, 100)
    session = await store.lease("worker")
    assert session is not None
    entries = [
        TurnEntry(turn="a", begin=TurnBegin(context=[1])),
        *(TurnEntry(turn="a", tokens=TurnTokens(token_ids=[token], logp=[-1.0], version=[0])) for token in (5, 5, 6)),
        TurnEntry(turn="a", end=TurnEnd(finish="stop")),
    ]
    lossy.lose_reply_to(b"EVALSHA")
    assert await store.reserve(session.key, "a", 10, 500) == 90
    for number, entry in enumerate(entries):
        lossy.lose_reply_to(b"EVALSHA")
        await store.append(session.key, entry, number)
    lossy.lose_reply_to(b"EVALSHA")
    await store.settle(session.key, "a", 13)
    assert lossy.num_lost == 7
    assert await store.turns(session.name) == entries
    assert await store.reserve(session.key, "b", 0, 500) == 100 - 13
    _, tokens = await read_counts(redis, keys)
    assert (tokens["generated"], tokens["in_flight"]) == (3, 3)
