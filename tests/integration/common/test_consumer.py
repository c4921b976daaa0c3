"""The consumer loop on a real Redis: what it takes, how long it keeps it, what it gives up, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo.common.streams.consumer import Consumer, DeadLetterError, Deliveries, Subscription
from gspo.common.streams.inbox import Delivery, EntryOutput, Inbox, append
from gspo.common.streams.keys import GENERATION, Keys
from gspo.common.streams.token_counts import RolloutTokens
from gspo_proto.rollout_pb2 import GroupTask, Prompt
from tests.support.typed.redis_entries import dead_letters, payloads

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(30)]
LEASE_S = 0.3


class Handler:
    """Keeps each batch until it is released, then finishes it; or does what a test says.

    Attributes:
        batches: The groups of every batch that it was handed, in order.
        ended: How each batch ended: "finished" or "cancelled".
    """

    def __init__(self, inbox: Inbox, work: Callable[[Deliveries], Awaitable[None]] | None = None) -> None:
        self.inbox, self._work = inbox, work
        self.batches: list[list[int]] = []
        self.ended: list[str] = []
        self.num_running = 0
        self.release = asyncio.Event()

    async def __call__(self, batch: Deliveries) -> None:
        self.batches.append([delivery.message.group for delivery in batch])
        self.num_running += 1
        try:
            await (self._work(batch) if self._work else self.release.wait())
            for delivery in batch:
                await self.inbox.finish(delivery)
            self.ended.append("finished")
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # a handler may have to clean up
            self.ended.append("cancelled")
            raise
        finally:
            self.num_running -= 1


def inbox(redis: Redis, keys: Keys, stream: str = "prompts", consumer: str = "a") -> Inbox:
    return Inbox(redis, keys, keys.key(stream), consumer=consumer, lease_s=LEASE_S)


@pytest.fixture
def handler(redis: Redis, keys: Keys) -> Handler:
    return Handler(inbox(redis, keys))


def subscribe(handler: Handler, *, most: int = 8, **options: Any) -> Subscription:
    options = {"batch_key": attrgetter("entry"), **options}
    return Subscription(handler.inbox, handler, lambda: most - handler.num_running, **options)


async def issue(redis: Redis, stream: str, *groups: int) -> None:
    prompt = Prompt(token_ids=[1])
    tasks = [GroupTask(schema=1, group=group, num_rollouts=1, prompt=prompt) for group in groups]
    await append(redis, stream, [task.SerializeToString() for task in tasks])


async def num_pending(redis: Redis, keys: Keys) -> int:
    return int((await redis.xpending(keys.prompts, GENERATION))["pending"])


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running(*subscriptions: Subscription, drain_s: float = 5.0, **options: Any) -> AsyncIterator[Consumer]:
    """A consumer that runs in the block, and drains at its end."""
    stopping = asyncio.Event()
    consumer = Consumer(subscriptions, stopping=stopping, drain_s=drain_s, **options)
    task = asyncio.create_task(consumer.run())
    try:
        yield consumer
    finally:
        stopping.set()
        await task


async def test_entries_are_handled_side_by_side_and_a_stop_waits_for_them(
    redis: Redis, keys: Keys, handler: Handler
) -> None:
    async with running(subscribe(handler)):
        await issue(redis, keys.prompts, 1, 2, 3)
        await until(lambda: len(handler.batches) == 3)
        asyncio.get_running_loop().call_later(0.2, handler.release.set)
    assert (handler.batches, handler.ended) == ([[1], [2], [3]], ["finished"] * 3)
    assert await redis.xlen(keys.prompts) == 0


async def test_a_lease_lasts_as_long_as_its_handler(redis: Redis, keys: Keys, handler: Handler) -> None:
    await issue(redis, keys.prompts, 1)
    async with running(subscribe(handler)):
        await until(lambda: handler.batches)
        for _ in range(20):
            assert await inbox(redis, keys, consumer="b").reclaim(1) == []
            await asyncio.sleep(LEASE_S / 8)
        handler.release.set()
    assert handler.ended == ["finished"]


async def steal(redis: Redis, keys: Keys, num: int) -> list[Delivery]:
    """Take entries over from the consumer, as another one does once their leases have ended."""
    entries: list[Any] = [
        entry["message_id"] for entry in await redis.xpending_range(keys.prompts, GENERATION, "-", "+", num)
    ]
    await redis.xclaim(keys.prompts, GENERATION, "a", 0, entries, idle=10_000, justid=True)
    return await inbox(redis, keys, consumer="b").reclaim(num)


async def test_a_handler_that_has_lost_its_lease_is_cancelled(redis: Redis, keys: Keys, handler: Handler) -> None:
    await issue(redis, keys.prompts, 1)
    async with running(subscribe(handler)):
        await until(lambda: handler.batches)
        (stolen,) = await steal(redis, keys, 1)
        assert await inbox(redis, keys, consumer="b").finish(stolen)
        await until(lambda: handler.ended)
        assert handler.ended == ["cancelled"]


async def test_a_batch_that_has_lost_a_part_goes_on(redis: Redis, keys: Keys, handler: Handler) -> None:
    await issue(redis, keys.prompts, 1, 2)
    async with running(subscribe(handler, batch_key=None)):
        await until(lambda: handler.batches)
        (stolen,) = await steal(redis, keys, 1)
        assert await inbox(redis, keys, consumer="b").finish(stolen)
        await asyncio.sleep(2 * LEASE_S)
        assert (handler.ended, await num_pending(redis, keys)) == ([], 1)
        handler.release.set()
    assert (handler.batches, handler.ended) == ([[1, 2]], ["finished"])


async def test_entries_whose_lease_has_ended_are_taken_over(redis: Redis, keys: Keys, handler: Handler) -> None:
    await issue(redis, keys.prompts, 1, 2, 3)
    assert len(await inbox(redis, keys, consumer="dead").take(3, 0)) == 3
    handler.release.set()
    async with running(subscribe(handler, most=1)):
        await until(lambda: len(handler.ended) == 3)
    assert sorted(handler.batches) == [[1], [2], [3]]


async def test_an_entry_handed_out_too_often_is_a_dead_letter_with_its_failure(
    redis: Redis, keys: Keys, handler: Handler
) -> None:
    await issue(redis, keys.prompts, 1)
    await inbox(redis, keys).take(1, 0)
    for _ in range(2):
        assert len(await steal(redis, keys, 1)) == 1

    def failure(delivery: Delivery, reason: str) -> list[tuple[str, bytes]]:
        return [(keys.scored, f"{delivery.message.group}: {reason}".encode())]

    async with running(subscribe(handler, max_deliveries=3, failure=failure)):
        while not await redis.xlen(keys.scored):
            await asyncio.sleep(0.01)
    reason = "handed out 3 times and never finished"
    assert await payloads(redis, keys.scored) == [f"1: {reason}".encode()]
    assert [(letter.group, letter.reason) for letter in await dead_letters(redis, keys)] == [(1, reason)]
    assert (handler.batches, await redis.xlen(keys.prompts)) == ([], 0)


async def test_a_batch_that_a_handler_gives_up_is_dead_letters(redis: Redis, keys: Keys) -> None:
    async def refuse(batch: Deliveries) -> None:
        raise DeadLetterError("no such model")

    handler = Handler(inbox(redis, keys), refuse)
    await issue(redis, keys.prompts, 1, 2)
    async with running(subscribe(handler, batch_key=None)):
        while await redis.xlen(keys.prompts):
            await asyncio.sleep(0.01)
    assert [letter.reason for letter in await dead_letters(redis, keys)] == ["no such model"] * 2


async def test_an_output_beyond_the_bound_of_an_entry_is_a_dead_letter(
    redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No consumer would take it, and Redis refuses the largest: written again and again, it would stop the others."""
    monkeypatch.setattr("gspo.common.streams.inbox.MAX_ENTRY_BYTES", 1000)
    tasks = inbox(redis, keys)

    async def write(batch: Deliveries) -> None:
        size = 1001 if batch[0].message.group == 1 else 1000
        await tasks.put(
            [EntryOutput(batch[0], keys.rollouts, b"r" * size, f"{batch[0].message.group}-0", RolloutTokens(1))]
        )
        await tasks.finish(batch[0])

    await issue(redis, keys.prompts, 1, 2)
    async with running(subscribe(Handler(tasks, write))):
        while await redis.xlen(keys.prompts):
            await asyncio.sleep(0.01)
    assert [letter.group for letter in await dead_letters(redis, keys)] == [1]
    assert await redis.xlen(keys.rollouts) == 1


async def test_the_error_of_a_handler_ends_the_consumer_after_the_other_handlers(redis: Redis, keys: Keys) -> None:
    async def fail(batch: Deliveries) -> None:
        await asyncio.sleep(0.05 if batch[0].message.group == 2 else 10)
        raise OSError("the engine is gone")

    handler = Handler(inbox(redis, keys), fail)
    await issue(redis, keys.prompts, 1, 2)
    with pytest.raises(OSError, match="the engine is gone"):
        async with running(subscribe(handler)):
            await until(lambda: handler.ended)
    assert handler.ended == ["cancelled"]
    assert await num_pending(redis, keys) == 2


async def test_a_cancelled_consumer_waits_for_its_handlers(redis: Redis, keys: Keys, handler: Handler) -> None:
    await issue(redis, keys.prompts, 1, 2)
    consumer = Consumer([subscribe(handler)], stopping=asyncio.Event(), drain_s=5)
    task = asyncio.create_task(consumer.run())
    await until(lambda: len(handler.batches) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handler.ended == ["cancelled", "cancelled"]


async def test_a_drain_that_takes_too_long_puts_its_entries_back(redis: Redis, keys: Keys, handler: Handler) -> None:
    await issue(redis, keys.prompts, 1, 2)
    saved: list[int] = []

    async def save() -> None:
        saved.append(handler.num_running)

    async with running(subscribe(handler), drain_s=0.1, on_cut_off=save):
        await until(lambda: len(handler.batches) == 2)
    assert (saved, handler.ended) == ([2], ["cancelled", "cancelled"])
    assert (await redis.xlen(keys.prompts), await num_pending(redis, keys)) == (2, 0)


async def test_no_more_is_taken_than_the_capacity_after_the_last_start(
    redis: Redis, keys: Keys, handler: Handler
) -> None:
    await issue(redis, keys.prompts, 1, 2, 3)
    async with running(subscribe(handler, most=2)):
        await until(lambda: len(handler.batches) == 2)
        await asyncio.sleep(0.2)
        assert handler.batches == [[1], [2]]
        handler.release.set()
        await until(lambda: handler.batches[2:])
    assert len(handler.ended) == 3


async def test_a_stream_without_capacity_keeps_those_behind_it_from_taking(
    redis: Redis, keys: Keys, handler: Handler
) -> None:
    behind = Handler(inbox(redis, keys, "eval_prompts"))
    behind.release.set()
    capacity = 0
    await issue(redis, keys.eval_prompts, 1)
    first = Subscription(handler.inbox, handler, lambda: capacity)
    async with running(first, subscribe(behind)) as consumer:
        await asyncio.sleep(0.2)
        assert behind.batches == []
        capacity = 1
        consumer.wake()
        await until(lambda: behind.ended)


async def test_the_order_says_which_streams_are_looked_at(redis: Redis, keys: Keys, handler: Handler) -> None:
    other = Handler(inbox(redis, keys, "paused_prompts"))
    subscriptions = [subscribe(handler), subscribe(other)]
    await issue(redis, keys.prompts, 1)
    await issue(redis, keys.paused_prompts, 2)
    order = subscriptions[1:]

    async def current_order() -> list[Subscription]:
        return order

    async with running(*subscriptions, order=current_order):
        await until(lambda: other.batches)
        await asyncio.sleep(0.2)
        assert handler.batches == []
        order = subscriptions
        await until(lambda: handler.batches)
        handler.release.set()
        other.release.set()


async def test_entries_of_a_burst_with_one_key_are_one_batch(redis: Redis, keys: Keys, handler: Handler) -> None:
    handler.release.set()
    subscription = subscribe(handler, batch_key=lambda delivery: delivery.message.group % 2, linger_s=0.5)
    async with running(subscription, max_batches=1):
        await issue(redis, keys.prompts, 1)
        await issue(redis, keys.prompts, 2)
        await issue(redis, keys.prompts, 3)
        await until(lambda: len(handler.ended) == 2)
    assert handler.batches == [[1, 3], [2]]


async def test_nothing_is_taken_while_as_many_batches_run_as_may(redis: Redis, keys: Keys, handler: Handler) -> None:
    async with running(subscribe(handler), max_batches=1):
        await issue(redis, keys.prompts, 1)
        await until(lambda: handler.batches)
        await issue(redis, keys.prompts, 2)
        await asyncio.sleep(0.2)
        assert handler.batches == [[1]]
        handler.release.set()
        await until(lambda: len(handler.ended) == 2)
