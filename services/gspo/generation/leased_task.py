"""The streams of tasks that a worker takes from, its leased tasks, and the outbox of their finished rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gspo.common.streams.inbox import Delivery, EntryOutput, Inbox
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto.rollout_pb2 import GroupTask


class Outbox:
    """Writes the outputs of one inbox's entries in bursts: those that come during one write go with the next.

    Rollouts of one engine step end together, and a round trip for each would cost more than their sampling.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._queue: list[tuple[EntryOutput, asyncio.Future[bool]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def put(self, output: EntryOutput) -> bool:
        """Write one output; whether its entry is still ours."""
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append((output, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return await written

    async def _write(self) -> None:
        while self._queue:
            burst, self._queue = self._queue, []
            try:
                kept = await self._inbox.put([output for output, _ in burst])
            except Exception as error:  # noqa: BLE001 - every `put` that waits raises it, and so ends the worker
                for _, written in burst:
                    if not written.done():
                        written.set_exception(error)
                continue
            for (_, written), ours in zip(burst, kept, strict=True):
                if not written.done():
                    written.set_result(ours)


class TaskSource:
    """One stream of tasks, and where their results go.

    Args:
        rollouts: Stream of the finished rollouts.
        scored: Stream of the failures of groups that are given up.
        group_size: Rollouts of a task, at most.
        segment_tokens: Tokens of a rollout in one step, while other tasks wait; None for any number.
    """

    def __init__(
        self, inbox: Inbox, rollouts: str, scored: str, group_size: int, segment_tokens: int | None = None
    ) -> None:
        self.inbox, self.outbox, self.rollouts, self.scored = inbox, Outbox(inbox), rollouts, scored
        self.group_size, self.segment_tokens = group_size, segment_tokens


@dataclass(eq=False)
class LeasedTask:
    """A task under this worker's lease.

    Attributes:
        num_running: Its rollouts that take a place in the engine.
        in_flight: Its rollouts that have begun and not ended, by number.
        awaits_weights: Whether it waits for newer weights.
        pauses: Whether its rollouts pause once they have used up their tokens of this step.
    """

    source: TaskSource
    delivery: Delivery
    num_running: int
    in_flight: dict[int, InFlightRollout] = field(default_factory=dict)
    awaits_weights: bool = False
    pauses: bool = False

    @property
    def task(self) -> GroupTask:
        """The task that the entry holds."""
        task: GroupTask = self.delivery.message
        return task

    def rollouts(self) -> Iterator[tuple[Inbox, Delivery, InFlightRollout]]:
        """Every rollout in flight, with the inbox and the delivery that a save needs."""
        for rollout in self.in_flight.values():
            yield self.source.inbox, self.delivery, rollout


def num_failed_deliveries(num_deliveries: int, unfinished: Iterable[InFlightRollout]) -> int:
    """Times that a task was handed out since a worker last saved a part of it: one that did has not failed."""
    return num_deliveries - max((rollout.state.delivery for rollout in unfinished), default=0)
