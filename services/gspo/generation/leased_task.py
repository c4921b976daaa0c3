"""A generator's leased tasks: the stream of each, its rollouts in flight, and every write under its lease.

Finished rollouts are written in bursts. In-flight rollouts are saved, so that a generator that dies costs at most
`save_tokens` tokens of each.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from gspo.common.config.engines import GenerationConfig
from gspo.common.streams.inbox import Delivery, EntryOutput, EntryState, Inbox
from gspo.common.telemetry import metrics
from gspo.generation.engine.api import EngineLike
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto.rollout_pb2 import GroupTask

# Short beside the time of half of save_tokens tokens, within which a save must begin and end.
_CHECK_EVERY_S = 0.1
# A rollout that grows slowly is saved after this time too.
_SAVE_EVERY_S = 30.0


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
            except Exception as error:  # noqa: BLE001 - every `put` that waits raises it, and so ends the generator
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
        finished_stream: Stream of the finished rollouts.
        scored_stream: Stream of the failures of groups that are given up.
        group_size: Rollouts of a task, at most.
        segment_tokens: Tokens of a rollout under one version, while other tasks wait; None for any number.
    """

    def __init__(
        self, inbox: Inbox, finished_stream: str, scored_stream: str, group_size: int, segment_tokens: int | None = None
    ) -> None:
        self.inbox, self.outbox, self.finished_stream = inbox, Outbox(inbox), finished_stream
        self.scored_stream, self.group_size, self.segment_tokens = scored_stream, group_size, segment_tokens


@dataclass(eq=False)
class LeasedTask:
    """A task under this generator's lease.

    Attributes:
        num_running: Its rollouts that take a place in the engine.
        in_flight: Its rollouts that have begun and not ended, by number.
        awaits_weights: Whether it waits for newer weights.
        pauses: Whether its rollouts pause at the end of their segments.
    """

    source: TaskSource
    delivery: Delivery
    num_running: int
    in_flight: dict[int, InFlightRollout] = field(default_factory=dict)
    awaits_weights: bool = False
    pauses: bool = False

    @property
    def task(self) -> GroupTask:
        task: GroupTask = self.delivery.message
        return task


class Saver:
    """Checks the in-flight rollouts at short intervals, and saves those that have grown enough.

    Args:
        leased: The tasks of the generator; GenerationLoop adds to this list and removes from it.
    """

    def __init__(self, config: GenerationConfig, engine: EngineLike, leased: list[LeasedTask]) -> None:
        self._engine, self._leased = engine, leased
        # Half of it: the other half covers the tokens that are sampled during the save.
        self._due_tokens = max(1, config.save_tokens // 2)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            await self.save(self._leased, paused=False)

    async def save(self, tasks: Iterable[LeasedTask], *, paused: bool) -> None:
        """Save the rollouts that have grown enough; all of them where this generator leaves the tasks to others."""
        states: dict[Inbox, list[EntryState]] = defaultdict(list)
        reported: list[tuple[InFlightRollout, int]] = []
        for leased in tasks:
            for rollout in leased.in_flight.values():
                if not paused and not self._is_due(rollout):
                    continue
                num_running = self._engine.num_sampled(rollout.request_id)
                read = partial(self._engine.partial_output, rollout.request_id)
                state, place = rollout.next_save(num_running, read, 0 if paused else leased.delivery.num_deliveries)
                tokens = rollout.tokens(num_running)
                saved = EntryState(leased.delivery, rollout.rollout_key, state, tokens, place)
                states[leased.source.inbox].append(saved)
                reported.append((rollout, tokens.num_sampled))
        num_saved = sum([await inbox.save(saved_states) for inbox, saved_states in states.items()])
        metrics.ROLLOUTS_SAVED.inc(num_saved)
        for rollout, num in reported:
            rollout.num_reported = max(rollout.num_reported, num)
            if num_saved < len(reported):  # a lost lease, or a state that is gone: the next save is whole
                rollout.num_pieces = -1

    def _is_due(self, rollout: InFlightRollout) -> bool:
        unsaved = len(rollout.state.token_ids) + self._engine.num_sampled(rollout.request_id) - rollout.num_saved
        return unsaved >= self._due_tokens or (unsaved > 0 and time.monotonic() - rollout.saved_s >= _SAVE_EVERY_S)
