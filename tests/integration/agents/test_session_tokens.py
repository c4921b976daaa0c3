"""The tokens of an agent's rollout: those that requests in flight reserve, and those of a group that has ended."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from gspo.common.streams.keys import GATEWAY, Keys
from gspo.common.streams.token_counts import abandon, read_counts
from gspo.gateway.sessions.session_store import RolloutTooLargeError, Session, SessionLostError, SessionStore
from gspo_proto.agent_pb2 import AgentResult, TurnBegin, TurnEntry, TurnTokens
from gspo_proto.rollout_pb2 import GroupTask

pytestmark = pytest.mark.asyncio(loop_scope="function")
FREE = 100


@pytest_asyncio.fixture(loop_scope="function")
async def stores(redis: Redis, keys: Keys) -> list[SessionStore]:
    """Those of two gateways that run."""
    for uid in ("one", "two"):
        await redis.set(keys.instance(GATEWAY, uid), "{}")
    return [SessionStore(redis, keys, 60.0, uid) for uid in ("one", "two")]


async def leased(redis: Redis, keys: Keys, store: SessionStore) -> Session:
    await redis.hset(keys.open, "7", "{}")
    await store.open(GroupTask(group=7, num_rollouts=1), 0, FREE)
    session = await store.lease("worker")
    assert session is not None
    return session


async def begun(store: SessionStore, key: str, request: str, context_tokens: int, answer_tokens: int) -> int | None:
    """The tokens that a request may have; it begins with them, if there are any."""
    granted = await store.reserve(key, request, context_tokens, answer_tokens)
    if granted:
        await store.append(key, TurnEntry(turn=request, begin=TurnBegin(context=[1])), 0)
    return granted


async def test_requests_side_by_side_share_what_is_left(redis: Redis, keys: Keys, stores: list[SessionStore]) -> None:
    first, second = stores
    key = (await leased(redis, keys, first)).key
    assert await begun(first, key, "a", 10, 50) == 50
    assert await begun(second, key, "b", 10, 50) == 30
    assert await begun(second, key, "c", 1, 50) is None, "the others may end with less"
    await first.settle(key, "a", 10 + 5)
    assert await begun(second, key, "c", 5, 90) == 100 - 15 - 40 - 5
    await second.settle(key, "b", 0)  # cancelled
    await second.settle(key, "c", 5 + 40)
    assert await begun(first, key, "d", 20, 90) == 100 - 15 - 45 - 20
    await first.settle(key, "d", 40)
    assert await begun(first, key, "e", 1, 1) == 0, "finished requests have them all"


async def test_an_empty_secret_is_no_key(redis: Redis, keys: Keys, stores: list[SessionStore]) -> None:
    session = await leased(redis, keys, stores[0])
    name = session.key.rpartition(".")[0]
    await stores[0].release(session.key)
    assert await stores[0].reopen(name) == 2
    for key in (f"{name}.", ".", "", name, "no-such."):
        with pytest.raises(SessionLostError):
            await stores[0].session(key)


async def test_a_finished_rollout_leaves_no_lease(redis: Redis, keys: Keys, stores: list[SessionStore]) -> None:
    session = await leased(redis, keys, stores[0])
    assert await stores[1].reopen(session.name) == 0
    assert await stores[1].lease("another") is None
    await stores[1].finish(session.key, AgentResult(reward=1.0))
    assert await stores[1].reopen(session.name) == 0
    for late in (stores[0].renew(session.key), stores[0].release(session.key)):
        with pytest.raises(SessionLostError):
            await late
    assert await redis.xlen(keys.agent_tasks) == 0
    consumers: Any = await redis.xinfo_consumers(keys.agent_tasks, GATEWAY)
    assert [consumer["name"] for consumer in consumers] == [b"lease"]


async def test_a_worker_whose_lease_has_ended_writes_nothing(
    redis: Redis, keys: Keys, stores: list[SessionStore]
) -> None:
    first, second = stores
    lost = await leased(redis, keys, first)
    await first.release(lost.key)
    assert await second.reopen(lost.name) == 2
    again = await second.lease("another")
    assert again is not None and again.name == lost.name
    entry, result = TurnEntry(turn="a", begin=TurnBegin(context=[1])), AgentResult(reward=0.0)
    for late in (first.session(lost.key), first.append(lost.key, entry, 0), first.finish(lost.key, result)):
        with pytest.raises(SessionLostError):
            await late
    assert await second.turns(lost.name) == []
    await second.finish(again.key, result)


async def test_the_bytes_of_a_rollout_are_bounded_with_those_of_cancelled_requests(redis: Redis, keys: Keys) -> None:
    await redis.set(keys.instance(GATEWAY, "one"), "{}")
    store = SessionStore(redis, keys, 60.0, "one", most_bytes=10_000)
    session = await leased(redis, keys, store)

    def entry(request: str) -> TurnEntry:
        return TurnEntry(turn=request, begin=TurnBegin(context=[1], messages_json="m" * 3000))

    for request in "abc":
        await store.reserve(session.key, request, 1, 5)
        await store.append(session.key, entry(request), 0)
        await store.settle(session.key, request, 0)  # cancelled
    for _ in range(20):
        with pytest.raises(RolloutTooLargeError, match="10000 bytes"):
            await store.append(session.key, entry("d"), 0)
    await store.append(session.key, TurnEntry(turn="c", tokens=TurnTokens(token_ids=[1])), 1)
    assert len(await store.turns(session.name)) == 4
    await store.release(session.key)
    assert await store.reopen(session.name) == 2
    again = await store.lease("worker")
    assert again is not None
    await store.append(again.key, entry("d"), 0)


async def test_the_tokens_of_a_lost_gateway_are_free_again(
    redis: Redis, keys: Keys, stores: list[SessionStore]
) -> None:
    first, second = stores
    key = (await leased(redis, keys, first)).key
    assert await first.reserve(key, "a", 10, 500) == 90
    assert await second.reserve(key, "a", 10, 500) is None
    await redis.delete(keys.instance(GATEWAY, "one"))
    assert await second.reserve(key, "a", 10, 500) == 90


async def test_the_next_attempt_has_every_token(redis: Redis, keys: Keys, stores: list[SessionStore]) -> None:
    first, second = stores
    session = await leased(redis, keys, first)
    assert await begun(first, session.key, "a", 10, 40) == 40
    await first.settle(session.key, "a", 50)
    assert await begun(first, session.key, "b", 10, 40) == 40
    await first.release(session.key)
    assert await first.reopen(session.name) == 2
    again = await second.lease("another")
    assert again is not None
    assert await second.reserve(again.key, "c", 0, 500) == FREE


async def test_tokens_of_an_ended_group_are_refused_and_counted(
    redis: Redis, keys: Keys, stores: list[SessionStore]
) -> None:
    session = await leased(redis, keys, stores[0])
    entry = TurnEntry(turn="a", tokens=TurnTokens(token_ids=[1, 2, 3], logp=[-1.0] * 3, version=[0] * 3))
    await stores[0].append(session.key, entry, 0)
    # As the coordinator ends a group.
    await abandon(redis, keys, [(session.name, None)])
    await redis.hdel(keys.open, "7")
    with pytest.raises(SessionLostError):
        await stores[1].append(session.key, entry, 1)
    _, tokens = await read_counts(redis, keys)
    assert tokens == {"generated": 6, "in_flight": 0, "unfinished": 3, "superseded": 3}
