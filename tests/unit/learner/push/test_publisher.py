"""The queue of pushes: how many are sent at a time, in which order, and what each may take."""

from __future__ import annotations

import asyncio

import pytest

from gspo.learner.push.publisher import SendQueue
from gspo.learner.push.weight_updates import UpdateKind

pytestmark = pytest.mark.asyncio(loop_scope="function")


class Pushes:
    """Pushes that are sent until the test says otherwise."""

    def __init__(self, queue: SendQueue) -> None:
        self._queue = queue
        self.sent: list[str] = []
        self.over: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, kind: UpdateKind, *uids: str) -> None:
        for uid in uids:
            self.over[uid] = asyncio.Event()
            self.tasks[uid] = asyncio.create_task(self._send(kind, uid))
        await settled()

    async def _send(self, kind: UpdateKind, uid: str) -> None:
        async with self._queue.send_slot(kind, uid) as release_slot:
            self.sent.append(uid)
            await self.over[uid].wait()
            release_slot()
            await asyncio.Event().wait()  # stages and loads, for ever

    def waiting(self) -> list[str]:
        return sorted(self._queue.waiting)


async def settled() -> None:
    """Everything that can go on has gone on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_whole_pushes_are_sent_one_after_another_in_the_order_in_which_they_asked() -> None:
    pushes = Pushes(SendQueue(60.0))
    await pushes.begin("full", "a", "b", "c", "d")
    assert (pushes.sent, pushes.waiting()) == (["a"], ["b", "c", "d"])
    pushes.over["a"].set()
    await settled()
    assert (pushes.sent, pushes.waiting()) == (["a", "b"], ["c", "d"]), "a push that was sent keeps its slot"
    # One that waits is cancelled, as when its generator goes; one that is sent fails.
    pushes.tasks["c"].cancel()
    pushes.tasks["b"].cancel()
    await settled()
    assert (pushes.sent, pushes.waiting()) == (["a", "b", "d"], [])
    pushes.tasks["a"].cancel()
    await pushes.begin("full", "e")
    assert pushes.waiting() == ["e"], "a slot that was free was given back twice"


async def test_changes_never_wait_behind_whole_policies() -> None:
    pushes = Pushes(SendQueue(60.0))
    await pushes.begin("full", "whole", "second")
    await pushes.begin("changes", *"12345")
    assert pushes.sent == ["whole", *"1234"]
    assert pushes.waiting() == ["5", "second"]


async def test_limits_are_learned_by_kind_and_doubled_by_failures() -> None:
    queue = SendQueue(60.0)
    for _ in range(8):
        queue.limits["changes"].record(1_000_000_000, 0.25)
    assert queue.limit_s("changes", 15_000_000_000) == 60.0
    assert queue.limit_s("full", 15_000_000_000) == 600.0
    assert [queue.limit_s("changes", 1, failures) for failures in (1, 3, 9)] == [120.0, 480.0, 480.0]
