"""Events on a real Redis: the end of the run is seen once, and that of an earlier session is not."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import Event, Finished, StopRequested
from tests.support.typed.redis_entries import dead_letters

pytestmark = pytest.mark.asyncio(loop_scope="function")


async def test_until_finished_ends_with_the_run(redis: Redis, keys: Keys) -> None:
    events = Events(redis, keys, "coordinator")
    assert await events.newest() == FROM_START
    waiting = asyncio.create_task(events.wait_for_finished(await events.newest()))
    await events.send(Event(stop_requested=StopRequested(reason="asked")))
    await events.send(Event(finished=Finished(reason="all steps done")))
    assert (await asyncio.wait_for(waiting, 5)).reason == "all steps done"


async def test_the_end_of_an_earlier_start_does_not_end_this_one(redis: Redis, keys: Keys) -> None:
    events = Events(redis, keys, "coordinator")
    await events.send(Event(finished=Finished(reason="the first life")))
    waiting = asyncio.create_task(events.wait_for_finished(await events.newest()))
    await events.send(Event(stop_requested=StopRequested(reason="asked")))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    await events.send(Event(finished=Finished(reason="the second life")))
    assert (await asyncio.wait_for(waiting, 5)).reason == "the second life"


async def test_who_follows_goes_on_after_a_wipe_by_a_clock_that_was_set_back(redis: Redis, keys: Keys) -> None:
    events = Events(redis, keys, "coordinator")
    await events.send(Event(stop_requested=StopRequested(reason="before")))
    waiting = asyncio.create_task(events.wait_for_finished(await events.newest()))
    await asyncio.sleep(0.1)
    await redis.flushall()
    payload = Event(schema=1, finished=Finished(reason="after")).SerializeToString()
    await redis.xadd(keys.events, {"d": payload}, id="5-1")
    assert (await asyncio.wait_for(waiting, 10)).reason == "after"


async def test_an_unreadable_event_is_one_dead_letter_for_all_readers(redis: Redis, keys: Keys) -> None:
    first, second = Events(redis, keys, "coordinator"), Events(redis, keys, "learner")
    await first.send(Event(finished=Finished(reason="the first life")))
    position = await first.newest()
    waiting = [asyncio.create_task(events.wait_for_finished(position)) for events in (first, second)]
    payload = Event(schema=2, finished=Finished(reason="of a later version")).SerializeToString()
    await redis.xadd(keys.events, {"d": payload})
    # Longer than one read: no reader begins anew because the newest event is gone.
    done, _ = await asyncio.wait(waiting, timeout=1.5)
    assert not done
    (letter,) = await dead_letters(redis, keys)
    assert (letter.stream, letter.payload) == ("events", payload)
    assert letter.reason == "schema 2, and this version reads 1"
    await first.send(Event(finished=Finished(reason="the second life")))
    assert {(await asyncio.wait_for(task, 5)).reason for task in waiting} == {"the second life"}
