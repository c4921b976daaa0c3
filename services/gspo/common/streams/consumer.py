"""The consumer loop: it takes entries, keeps their leases, hands them to a handler, and dead-letters the hopeless ones.

consumes: the streams of its subscriptions. produces: dead letters; results are the handler's.
waits for: capacity, entries. unblocked by: the end of a handler, `wake`, the writers of the streams.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from gspo.common.streams.entries import EntryTooLargeError
from gspo.common.streams.inbox import Delivery, Inbox
from gspo.common.tasks import task_group, wait_until_set

Deliveries: TypeAlias = Sequence[Delivery]
# An idle consumer waits so long on its first stream before it looks at the others again.
_IDLE_S = 0.05
# A full consumer looks again after this, so that a lost signal costs no more.
_RECHECK_S = 1.0
# A handler that has just finished its entries needs no longer to return.
_FINISHING_S = 0.2
log = structlog.get_logger()


class DeadLetterError(Exception):
    """Raised by a handler to give its batch up: each entry becomes a dead letter with this reason."""


@dataclass(frozen=True, eq=False)
class Subscription:
    """One stream and the handler of its entries.

    Attributes:
        inbox: The stream, as this consumer sees it.
        handle: Works on a batch, and finishes, acknowledges or requeues each of its entries. That comes last: a handler
            without a leased entry is cancelled at the next renewal.
        capacity: Entries that may be taken now. It is asked after every started handler has run to its first wait.
        batch_key: Entries that are taken together make a batch for each key; without one they are a single batch.
        linger_s: Time in which a smaller number of entries than the capacity may grow.
        max_deliveries: An entry that was handed out more often is given up; None never gives up.
        failure: The outputs (stream, payload) that go with an entry's dead letter, from the entry and the reason.
    """

    inbox: Inbox
    handle: Callable[[Deliveries], Awaitable[None]]
    capacity: Callable[[], int]
    batch_key: Callable[[Delivery], Hashable] | None = None
    linger_s: float = 0.0
    max_deliveries: int | None = None
    failure: Callable[[Delivery, str], Sequence[tuple[str, bytes]]] | None = None


class Consumer:
    """Handles the entries of some streams side by side, until it is stopped.

    Args:
        subscriptions: The streams, the most urgent first. One without capacity also keeps those behind it from taking,
            so that small work does not starve large work.
        stopping: Once it is set, nothing more is taken, and `run` ends with the last handler.
        drain_s: Time that handlers have after that. Entries that are unfinished then go back to their streams at once.
        max_batches: Nothing is taken while so many batches are in flight, of all streams together.
        order: Called before each look at the streams for the subscriptions to look at; all of them by default.
        on_cut_off: Called when the drain has taken too long, while the handlers still run.
    """

    def __init__(
        self,
        subscriptions: Sequence[Subscription],
        *,
        stopping: asyncio.Event,
        drain_s: float,
        max_batches: int | None = None,
        order: Callable[[], Awaitable[Sequence[Subscription]]] | None = None,
        on_cut_off: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._subscriptions, self._stopping, self._drain_s = subscriptions, stopping, drain_s
        self._max_batches, self._order, self._on_cut_off = max_batches, order, on_cut_off
        self._lease_s = min(subscription.inbox.lease_s for subscription in subscriptions)
        self._reclaim_at: dict[Subscription, float] = defaultdict(float)
        self._in_flight: dict[asyncio.Task[None], tuple[Subscription, Deliveries]] = {}
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Look at the streams now: the capacity or the order has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Take and handle entries until `stopping` is set, then drain. A cancellation ends every handler first.

        Raises:
            Exception: The error of a handler, other than DeadLetterError.
        """
        async with task_group(self._keep_leases()) as tasks:
            while not self._stopping.is_set():
                await self._take(tasks)
            await self._drain()

    async def _take(self, tasks: asyncio.TaskGroup) -> None:
        """Start handlers for the entries of one stream, or wait for entries or capacity."""
        self._changed.clear()
        order = await self._order() if self._order else self._subscriptions
        if not self._capacity(order[0]):
            await wait_until_set(self._changed, _RECHECK_S)
            return
        for subscription in order:
            if not (num := self._capacity(subscription)):
                break
            if deliveries := await self._look(subscription, num):
                await self._start(tasks, subscription, deliveries)
                return
        if num := self._capacity(order[0]):
            await self._start(tasks, order[0], await self._read(order[0], num, _IDLE_S))

    def _capacity(self, subscription: Subscription) -> int:
        if self._max_batches is not None and len(self._in_flight) >= self._max_batches:
            return 0
        return subscription.capacity()

    async def _look(self, subscription: Subscription, num: int) -> list[Delivery]:
        """Entries that are there now: at times those whose lease has ended, else new ones."""
        if time.monotonic() >= self._reclaim_at[subscription]:
            if deliveries := await subscription.inbox.reclaim(num):
                return deliveries
            self._reclaim_at[subscription] = time.monotonic() + self._lease_s / 3
        return await self._read(subscription, num, 0)

    async def _read(self, subscription: Subscription, num: int, block_s: float) -> list[Delivery]:
        deliveries = await subscription.inbox.take(num, block_s)
        if subscription.linger_s and 0 < len(deliveries) < num:
            await asyncio.sleep(subscription.linger_s)
            deliveries += await subscription.inbox.take(num - len(deliveries), 0)
        return deliveries

    async def _start(self, tasks: asyncio.TaskGroup, subscription: Subscription, deliveries: Deliveries) -> None:
        batches: dict[Hashable, list[Delivery]] = defaultdict(list)
        for delivery in deliveries:
            if subscription.max_deliveries is not None and delivery.num_deliveries > subscription.max_deliveries:
                reason = f"handed out {delivery.num_deliveries - 1} times and never finished"
                await _give_up(subscription, [delivery], reason)
            else:
                key = subscription.batch_key(delivery) if subscription.batch_key else None
                batches[key].append(delivery)
        for batch in batches.values():
            task = tasks.create_task(_handle(subscription, batch), name=subscription.inbox.stream)
            self._in_flight[task] = subscription, batch
            task.add_done_callback(self._ended)
        await asyncio.sleep(0)  # handlers run to their first wait before the capacity is asked again

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._in_flight[task]
        self._changed.set()

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._renew()

    async def _renew(self) -> None:
        """Renew every lease; end the handlers that have lost all of theirs."""
        lost: dict[asyncio.Task[None], Deliveries] = {}
        for subscription in self._subscriptions:
            batches = {task: batch for task, (source, batch) in self._in_flight.items() if source is subscription}
            kept = await subscription.inbox.renew([delivery for batch in batches.values() for delivery in batch])
            lost |= {
                task: batch for task, batch in batches.items() if not any(delivery.entry in kept for delivery in batch)
            }
        if lost:
            _, running = await asyncio.wait(lost, timeout=_FINISHING_S)
            for task in running:
                log.info("lease_lost", stream=task.get_name(), entries=[d.entry.decode() for d in lost[task]])
                task.cancel()

    async def _drain(self) -> None:
        await self._renew()  # at the end of a run the coordinator has taken its tasks back
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=self._drain_s)
        if not self._in_flight:
            return
        log.warning("drain_timeout", num_batches=len(self._in_flight), detail="its entries go to other consumers")
        if self._on_cut_off:
            await self._on_cut_off()
        for task, (subscription, batch) in list(self._in_flight.items()):
            task.cancel()
            for delivery in batch:
                await subscription.inbox.requeue(delivery)


async def _handle(subscription: Subscription, batch: Deliveries) -> None:
    try:
        await subscription.handle(batch)
    except (DeadLetterError, EntryTooLargeError) as error:
        await _give_up(subscription, batch, str(error))


async def _give_up(subscription: Subscription, batch: Deliveries, reason: str) -> None:
    for delivery in batch:
        outputs = subscription.failure(delivery, reason) if subscription.failure else ()
        await subscription.inbox.dead_letter(delivery, reason, outputs)
