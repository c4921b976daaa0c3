"""Saves in-flight rollouts, so that a generator that dies costs at most `save_tokens` tokens of each.

consumes: the engine's tokens so far. produces: states in the hash `partial`. waits for: time alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from gspo.common.config.schema import GenerationConfig
from gspo.common.streams.inbox import Delivery, EntryState, Inbox
from gspo.common.telemetry import metrics
from gspo.generation.engine.api import EngineLike
from gspo.generation.rollout.in_flight import InFlightRollout

# Short beside the time of half of save_tokens tokens, within which a save must begin and end.
_CHECK_EVERY_S = 0.1
# A rollout that grows slowly is saved after this time too.
_SAVE_EVERY_S = 30.0


class Saver:
    """Checks the in-flight rollouts at short intervals, and saves those that have grown enough.

    Args:
        in_flight: Lists the in-flight rollouts, each with the inbox and the delivery of its task.
    """

    def __init__(
        self,
        config: GenerationConfig,
        engine: EngineLike,
        in_flight: Callable[[], Iterable[tuple[Inbox, Delivery, InFlightRollout]]],
    ) -> None:
        self._engine, self._in_flight = engine, in_flight
        # Half of it: the other half covers the tokens that are sampled during the save.
        self._due_tokens = max(1, config.save_tokens // 2)

    async def run(self) -> None:
        """Save until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            await self.save([entry for entry in self._in_flight() if self._is_due(entry[2])])

    async def save(self, entries: Iterable[tuple[Inbox, Delivery, InFlightRollout]], *, paused: bool = False) -> None:
        """Save rollouts as they are now.

        Args:
            paused: Whether this worker gives them up to any generator.
        """
        states: dict[Inbox, list[EntryState]] = {}
        for inbox, delivery, rollout in entries:
            running = self._engine.partial_output(rollout.request_id)
            state = rollout.snapshot(running, 0 if paused else delivery.num_deliveries)
            rollout.num_saved, rollout.saved_s = len(state.token_ids), time.monotonic()
            states.setdefault(inbox, []).append(EntryState(delivery, rollout.rollout_key, state.SerializeToString()))
        for inbox, saved in states.items():
            metrics.ROLLOUTS_SAVED.inc(await inbox.save(saved))

    def _is_due(self, rollout: InFlightRollout) -> bool:
        unsaved = len(rollout.state.token_ids) + self._engine.num_sampled(rollout.request_id) - rollout.num_saved
        return unsaved >= self._due_tokens or (unsaved > 0 and time.monotonic() - rollout.saved_s >= _SAVE_EVERY_S)
