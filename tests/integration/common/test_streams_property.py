"""Leases against a model, on a real Redis: any order of delivery, redelivery, crash, restart and wipe.

The end of a lease is made by setting an entry's idle time, so nothing depends on a clock. Stale hands are kept: every
example has writes of workers that lost their lease.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from gspo.common.streams.inbox import Delivery, EntryOutput, Inbox, append, create_consumer_groups
from gspo.common.streams.keys import GENERATION, Keys
from gspo_proto.rollout_pb2 import GroupTask, Prompt

WORKERS = ("a", "b", "c")
LEASE_S, EXPIRED_MS = 60.0, 120_000
NUM_ROLLOUTS = 2


@dataclass
class Model:
    """The expected state of Redis: entry -> (owner, count, whether its lease ended), and the written outputs."""

    leased: dict[bytes, tuple[str, int, bool]] = field(default_factory=dict)
    waiting: list[bytes] = field(default_factory=list)
    written: Counter[bytes] = field(default_factory=Counter)
    done_keys: set[str] = field(default_factory=set)

    def owns(self, worker: str, delivery: Delivery) -> bool:
        """Whether a worker may write for a delivery."""
        return self.leased.get(delivery.entry, ("", 0, False))[:2] == (worker, delivery.num_deliveries)


class Leases(RuleBasedStateMachine):
    """Three workers on one stream."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop, self.keys, self.model = asyncio.new_event_loop(), Keys("leases"), Model()
        self.redis = Redis.from_url(self.url, protocol=2)
        self.inboxes = {name: self._inbox(name) for name in WORKERS}
        self.hands: list[tuple[str, Delivery]] = []
        self.num_added = 0

    @initialize()
    def begin(self) -> None:
        self._do(self.redis.flushall())
        self._do(create_consumer_groups(self.redis, self.keys))

    @rule(num=st.integers(1, 3))
    def add(self, num: int) -> None:
        for _ in range(num):
            self.num_added += 1
            task = GroupTask(schema=1, group=self.num_added, num_rollouts=NUM_ROLLOUTS, prompt=Prompt(token_ids=[1]))
            self._do(append(self.redis, self.keys.prompts, [task.SerializeToString()]))
        entries = [entry for entry, _ in self._do(self.redis.xrange(self.keys.prompts))]
        self.model.waiting = [entry for entry in entries if entry not in self.model.leased]

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 3))
    def take(self, worker: str, count: int) -> None:
        taken = self._do(self.inboxes[worker].take(count, 0))
        assert [item.entry for item in taken] == self.model.waiting[:count]
        del self.model.waiting[:count]
        self._hand(worker, taken, counts=dict.fromkeys((item.entry for item in taken), 1))

    @precondition(lambda self: bool(self.model.leased))
    @rule(data=st.data())
    def let_a_lease_end(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(sorted(self.model.leased)))
        owner, count, _ = self.model.leased[entry]
        self._do(self.redis.xclaim(self.keys.prompts, GENERATION, owner, 0, [entry], idle=EXPIRED_MS, justid=True))
        self.model.leased[entry] = (owner, count, True)

    @rule(worker=st.sampled_from(WORKERS))
    def reclaim(self, worker: str) -> None:
        taken = self._do(self.inboxes[worker].reclaim(100))
        expired = {entry: count for entry, (_, count, is_over) in self.model.leased.items() if is_over}
        assert {item.entry for item in taken} == set(expired)
        self._hand(worker, taken, counts={entry: count + 1 for entry, count in expired.items()})

    @rule(worker=st.sampled_from(WORKERS))
    def crash_and_restart(self, worker: str) -> None:
        """A process of the same name takes its leased entries again; its predecessor's hands stay, as a zombie's."""
        self.inboxes[worker] = self._inbox(worker)
        taken = self._do(self.inboxes[worker].take_own_pending(100))
        mine = {entry: count for entry, (owner, count, _) in self.model.leased.items() if owner == worker}
        assert {item.entry for item in taken} == set(mine)
        self._hand(worker, taken, counts={entry: count + 1 for entry, count in mine.items()})

    @precondition(lambda self: bool(self.hands))
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        worker, delivery = data.draw(st.sampled_from(self.hands))
        is_ours = self.model.owns(worker, delivery)
        assert self._do(self.inboxes[worker].renew([delivery])) == ({delivery.entry} if is_ours else set())
        if is_ours:
            self.model.leased[delivery.entry] = (worker, delivery.num_deliveries, False)

    @precondition(lambda self: bool(self.hands))
    @rule(data=st.data(), number=st.integers(0, NUM_ROLLOUTS - 1))
    def write_a_rollout(self, data: st.DataObject, number: int) -> None:
        worker, delivery = data.draw(st.sampled_from(self.hands))
        key, is_ours = f"{delivery.message.group}-{number}", self.model.owns(worker, delivery)
        output = EntryOutput(delivery, self.keys.rollouts, key.encode(), key)
        assert self._do(self.inboxes[worker].put([output])) == [is_ours]
        if is_ours:
            self.model.leased[delivery.entry] = (worker, delivery.num_deliveries, False)
            if key not in self.model.done_keys:
                self.model.done_keys.add(key)
                self.model.written[key.encode()] += 1

    @precondition(lambda self: bool(self.hands))
    @rule(data=st.data(), how=st.sampled_from(("finish", "finish_many", "dead_letter")))
    def finish(self, data: st.DataObject, how: str) -> None:
        worker, delivery = data.draw(st.sampled_from(self.hands))
        inbox, payload = self.inboxes[worker], f"end of {delivery.message.group}".encode()
        if how == "finish_many":
            done = delivery.entry in self._do(inbox.finish_many(self.keys.rollouts, [(delivery, payload)]))
        elif how == "dead_letter":
            done = self._do(inbox.dead_letter(delivery, "no reason", [(self.keys.rollouts, payload)]))
        else:
            done = self._do(inbox.finish(delivery, [(self.keys.rollouts, payload)]))
        assert done == self.model.owns(worker, delivery)
        if done:
            del self.model.leased[delivery.entry]
            self.model.written[payload] += 1

    @precondition(lambda self: bool(self._late()))
    @rule(data=st.data())
    def write_late(self, data: st.DataObject) -> None:
        """A worker that has lost its lease, or has an older delivery, can write nothing."""
        worker, delivery = data.draw(st.sampled_from(self._late()))
        inbox, late = self.inboxes[worker], [(self.keys.rollouts, b"late")]
        assert self._do(inbox.put([EntryOutput(delivery, self.keys.rollouts, b"late", "late")])) == [False]
        assert self._do(inbox.finish_many(self.keys.rollouts, [(delivery, b"late")])) == set()
        assert self._do(inbox.renew([delivery])) == set()
        assert not self._do(inbox.finish(delivery, late))
        assert not self._do(inbox.dead_letter(delivery, "late", late))

    @rule()
    def wipe(self) -> None:
        """Redis comes back empty; the hands of before may write nothing."""
        self._do(self.redis.flushall())
        self.model = Model()
        for worker, delivery in self.hands:
            assert not self._do(self.inboxes[worker].finish(delivery, [(self.keys.rollouts, b"late")]))
        self._do(create_consumer_groups(self.redis, self.keys))

    @invariant()
    def redis_holds_what_the_model_holds(self) -> None:
        if not self.num_added:
            return
        pending = self._do(self.redis.xpending_range(self.keys.prompts, GENERATION, "-", "+", 1000))
        leased = {item["message_id"]: (item["consumer"].decode(), item["times_delivered"]) for item in pending}
        assert leased == {entry: (owner, count) for entry, (owner, count, _) in self.model.leased.items()}
        written = Counter(fields[b"d"] for _, fields in self._do(self.redis.xrange(self.keys.rollouts)))
        assert written == self.model.written
        assert max(written.values(), default=0) <= 1
        assert self._do(self.redis.xlen(self.keys.prompts)) == len(self.model.leased) + len(self.model.waiting)

    def teardown(self) -> None:
        self._do(self.redis.aclose())
        self.loop.close()

    def _hand(self, worker: str, taken: list[Delivery], counts: dict[bytes, int]) -> None:
        for delivery in taken:
            assert delivery.num_deliveries == counts[delivery.entry]
            self.model.leased[delivery.entry] = (worker, delivery.num_deliveries, False)
            self.hands.append((worker, delivery))

    def _late(self) -> list[tuple[str, Delivery]]:
        return [(worker, delivery) for worker, delivery in self.hands if not self.model.owns(worker, delivery)]

    def _inbox(self, worker: str) -> Inbox:
        return Inbox(self.redis, self.keys, self.keys.prompts, consumer=worker, lease_s=LEASE_S)

    def _do(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)


@pytest.mark.hypothesis
def test_leases_hold_in_any_order_of_delivery_crash_and_wipe(redis_url: str) -> None:
    Leases.url = redis_url
    run_state_machine_as_test(
        Leases, settings=settings(stateful_step_count=30, suppress_health_check=list(HealthCheck))
    )
