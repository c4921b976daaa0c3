"""Leases on a real Redis: only the owner writes, and no output is written twice."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from gspo.common.streams.inbox import Delivery, EntryOutput, EntryState, Inbox, append
from gspo.common.streams.keys import Keys
from gspo.common.streams.saved_states import DONE
from gspo_proto.rollout_pb2 import GroupTask, Prompt
from tests.support.typed.redis_entries import payloads, stream_entries

pytestmark = pytest.mark.asyncio(loop_scope="function")
# Several calls fit into it many times, also where a garbage collection comes between them.
LEASE_S = 0.25


def task(group: int) -> bytes:
    return GroupTask(schema=1, group=group, num_rollouts=1, prompt=Prompt(token_ids=[1])).SerializeToString()


TASK = task(0)


def inbox(redis: Redis, keys: Keys, consumer: str) -> Inbox:
    return Inbox(redis, keys, keys.prompts, consumer=consumer, lease_s=LEASE_S)


async def take_one(redis: Redis, keys: Keys, consumer: str) -> tuple[Inbox, Delivery]:
    worker = inbox(redis, keys, consumer)
    await append(redis, keys.prompts, [TASK])
    (delivery,) = await worker.take(1, block_s=1)
    return worker, delivery


async def put(worker: Inbox, delivery: Delivery, keys: Keys, payload: bytes, key: str) -> bool:
    (kept,) = await worker.put([EntryOutput(delivery, keys.rollouts, payload, key)])
    return kept


async def test_finish_writes_the_output_and_removes_the_entry(redis: Redis, keys: Keys) -> None:
    worker, delivery = await take_one(redis, keys, "a")
    assert (delivery.payload, delivery.num_deliveries) == (TASK, 1)
    assert await worker.finish(delivery, [(keys.rollouts, b"out")])
    assert await redis.xlen(keys.prompts) == 0
    assert (await redis.xpending(keys.prompts, "generation"))["pending"] == 0
    assert [fields for _, fields in await stream_entries(redis, keys.rollouts)] == [{b"d": b"out"}]


async def test_a_stream_that_is_not_made_yet_is_no_warning_and_one_that_is_lost_is(redis: Redis, keys: Keys) -> None:
    worker = inbox(redis, keys, "a")
    await redis.delete(keys.prompts)
    with capture_logs() as lines:
        assert await worker.take(1, block_s=0) == []
    assert [(line["event"], line["log_level"]) for line in lines] == [("stream_not_made_yet", "debug")]
    assert await worker.take(1, block_s=0) == []
    await redis.delete(keys.prompts)
    with capture_logs() as lines:
        assert await worker.take(1, block_s=0) == []
    assert [(line["event"], line["log_level"]) for line in lines] == [("stream_missing", "warning")]


async def test_a_burst_writes_what_is_ours_and_renews_it(redis: Redis, keys: Keys) -> None:
    worker = inbox(redis, keys, "a")
    await append(redis, keys.prompts, [task(0), task(1)])
    lost, kept = await worker.take(2, block_s=1)
    await asyncio.sleep(2 * LEASE_S)
    (taken,) = await inbox(redis, keys, "b").reclaim(1)
    assert taken.entry == lost.entry
    outputs = [
        EntryOutput(lost, keys.rollouts, b"late", "0-0"),
        EntryOutput(kept, keys.rollouts, b"first", "1-0"),
        EntryOutput(kept, keys.scored, b"elsewhere", "1-1"),
        EntryOutput(kept, keys.rollouts, b"again", "1-0"),
    ]
    assert await worker.put(outputs) == [False, True, True, True]
    assert await payloads(redis, keys.rollouts) == [b"first"]
    assert await payloads(redis, keys.scored) == [b"elsewhere"]
    assert await worker.load(["0-0", "1-0", "1-1"]) == [None, DONE, DONE]
    # Just renewed, no other worker can reclaim it; the attempt is the same, so that it can be finished.
    assert await inbox(redis, keys, "c").reclaim(1) == []
    assert await worker.finish(kept)


async def test_a_worker_that_lost_its_lease_cannot_write(redis: Redis, keys: Keys) -> None:
    sleeper, delivery = await take_one(redis, keys, "a")
    await asyncio.sleep(2 * LEASE_S)
    (taken,) = await inbox(redis, keys, "b").reclaim(10)
    assert (taken.payload, taken.num_deliveries) == (TASK, 2)
    assert await sleeper.renew([delivery]) == set()
    assert not await put(sleeper, delivery, keys, b"late", "1-0")
    assert not await sleeper.finish(delivery, [(keys.rollouts, b"late")])
    assert await redis.xlen(keys.rollouts) == 0
    assert await inbox(redis, keys, "b").finish(taken, [(keys.rollouts, b"in time")])


async def test_the_same_worker_at_an_older_attempt_cannot_write(redis: Redis, keys: Keys) -> None:
    worker, first = await take_one(redis, keys, "a")
    await asyncio.sleep(2 * LEASE_S)
    (second,) = await worker.reclaim(10)
    assert not await worker.finish(first, [(keys.rollouts, b"old")])
    assert await worker.finish(second)


async def test_finish_many_writes_only_what_is_still_leased(redis: Redis, keys: Keys) -> None:
    worker = inbox(redis, keys, "a")
    await append(redis, keys.prompts, [task(1), task(2)])
    kept, lost = await worker.take(2, block_s=1)
    await asyncio.sleep(2 * LEASE_S)
    assert await worker.renew([kept]) == {kept.entry}
    (taken,) = await inbox(redis, keys, "b").reclaim(10)
    assert taken.entry == lost.entry
    finished = await worker.finish_many(keys.rollouts, [(lost, b"late"), (kept, b"in time")])
    assert finished == {kept.entry}
    assert [fields for _, fields in await stream_entries(redis, keys.rollouts)] == [{b"d": b"in time"}]
    assert [entry for entry, _ in await stream_entries(redis, keys.prompts)] == [lost.entry]
    assert (await redis.xpending(keys.prompts, "generation"))["pending"] == 1
    assert await worker.finish_many(keys.rollouts, []) == set()


async def test_a_renewed_lease_is_not_reclaimed(redis: Redis, keys: Keys) -> None:
    worker, delivery = await take_one(redis, keys, "a")
    for _ in range(4):
        await asyncio.sleep(LEASE_S / 2)
        assert await worker.renew([delivery]) == {delivery.entry}
    assert await inbox(redis, keys, "b").reclaim(10) == []


async def test_the_first_result_of_an_id_wins(redis: Redis, keys: Keys) -> None:
    worker, delivery = await take_one(redis, keys, "a")
    assert await put(worker, delivery, keys, b"first", "1-0")
    assert await put(worker, delivery, keys, b"second", "1-0")
    assert await put(worker, delivery, keys, b"other", "1-1")
    assert await payloads(redis, keys.rollouts) == [b"first", b"other"]


async def test_a_partial_save_does_not_count_as_finished(redis: Redis, keys: Keys) -> None:
    worker, delivery = await take_one(redis, keys, "a")
    await redis.hset(keys.partial, "1-0", "tokens so far")
    assert await put(worker, delivery, keys, b"first", "1-0")
    assert await redis.xlen(keys.rollouts) == 1


async def test_a_restarted_consumer_finds_its_leased_entries(redis: Redis, keys: Keys) -> None:
    _, delivery = await take_one(redis, keys, "learner")
    (received,) = await inbox(redis, keys, "learner").take_own_pending(10)
    assert (received.entry, received.payload, received.num_deliveries) == (delivery.entry, TASK, 2)


async def test_a_wiped_redis_gives_nothing_and_no_error(redis: Redis, keys: Keys) -> None:
    worker, delivery = await take_one(redis, keys, "a")
    await redis.flushall()
    assert not await worker.finish(delivery, [(keys.rollouts, b"out")])
    assert await worker.finish_many(keys.rollouts, [(delivery, b"out")]) == set()
    assert await worker.renew([delivery]) == set()
    assert await worker.reclaim(1) == []
    assert await worker.save([EntryState(delivery, "1-0", b"tokens")]) == 0
    assert not await worker.requeue(delivery)
    assert await worker.num_untaken() == 0
    assert await worker.take(1, block_s=0.01) == []
    await append(redis, keys.prompts, [TASK])
    assert [received.payload for received in await worker.take(1, block_s=1)] == [TASK]


async def test_a_save_stands_until_the_output_is_written(redis: Redis, keys: Keys) -> None:
    worker, delivery = await take_one(redis, keys, "a")
    assert await worker.save([EntryState(delivery, "1-0", b"two tokens"), EntryState(delivery, "1-1", b"four")]) == 2
    assert await worker.save([EntryState(delivery, "1-0", b"three tokens")]) == 1
    assert await worker.load(["1-0", "1-1", "1-2"]) == [b"three tokens", b"four", None]
    assert await put(worker, delivery, keys, b"whole", "1-0")
    assert await worker.save([EntryState(delivery, "1-0", b"late")]) == 0
    assert await worker.load(["1-0"]) == [DONE]
    assert await worker.load([]) == []


async def test_pieces_follow_a_saved_state_in_order_each_once(redis: Redis, keys: Keys) -> None:
    worker, delivery = await take_one(redis, keys, "a")

    async def save(state: bytes, place: int) -> int:
        return await worker.save([EntryState(delivery, "1-0", state, place=place)])

    assert await save(b" two", 1) == 0  # nothing is there that it could follow
    assert await save(b"one", 0) == 1
    for _ in range(2):  # the reply of the first call may have been lost
        assert await save(b" two", 1) == 1
    assert (await save(b" other", 1), await save(b" four", 3)) == (0, 0)
    assert await save(b" three", 2) == 1
    assert await worker.load(["1-0"]) == [b"one two three"]
    assert await save(b"anew", 0) == 1
    assert await worker.load(["1-0"]) == [b"anew"]
    assert await save(b" and on", 1) == 1
    assert await put(worker, delivery, keys, b"whole", "1-0")
    assert await save(b" late", 2) == 0
    assert await worker.load(["1-0"]) == [DONE]
    assert not await redis.exists(f"{keys.pieces}1-0")


async def test_a_worker_that_lost_its_lease_cannot_save_or_requeue(redis: Redis, keys: Keys) -> None:
    sleeper, delivery = await take_one(redis, keys, "a")
    await asyncio.sleep(2 * LEASE_S)
    other = inbox(redis, keys, "b")
    (taken,) = await other.reclaim(10)
    assert await other.save([EntryState(taken, "1-0", b"mine")]) == 1
    assert await sleeper.save([EntryState(delivery, "1-0", b"late")]) == 0
    assert not await sleeper.requeue(delivery)
    assert await sleeper.load(["1-0"]) == [b"mine"]
    assert await redis.xlen(keys.prompts) == 1


async def test_a_requeued_entry_goes_to_the_end_for_any_worker(redis: Redis, keys: Keys) -> None:
    worker, delivery = await take_one(redis, keys, "a")
    await append(redis, keys.prompts, [task(1)])
    assert await worker.num_untaken() == 1
    assert await worker.requeue(delivery)
    assert await worker.num_untaken() == 2
    received = await inbox(redis, keys, "b").take(2, block_s=1)
    assert [(taken.payload, taken.num_deliveries) for taken in received] == [(task(1), 1), (TASK, 1)]


async def test_a_requeued_entry_may_go_to_another_stream(redis: Redis, keys: Keys) -> None:
    worker, delivery = await take_one(redis, keys, "a")
    assert await worker.requeue(delivery, stream=keys.paused_prompts)
    assert await redis.xlen(keys.prompts) == 0
    paused = Inbox(redis, keys, keys.paused_prompts, consumer="b", lease_s=LEASE_S)
    assert [received.payload for received in await paused.take(2, block_s=1)] == [TASK]


async def test_an_entry_requeued_after_its_group_has_ended_is_gone(redis: Redis, keys: Keys) -> None:
    worker, delivery = await take_one(redis, keys, "a")
    await redis.hset(keys.open, "8", "{}")
    assert await worker.requeue(delivery, group=7)
    assert await redis.xlen(keys.prompts) == 0
    await append(redis, keys.prompts, [TASK])
    (delivery,) = await worker.take(1, block_s=1)
    assert await worker.requeue(delivery, group=8)
    assert await redis.xlen(keys.prompts) == 1
