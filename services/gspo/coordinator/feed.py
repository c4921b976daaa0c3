"""The run's events as the coordinator reads and sends them."""

from __future__ import annotations

import structlog
from google.protobuf.message import Message

from gspo.common.service.app import Service
from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.messages import body_of
from gspo.coordinator.redis_state import newest_entries, readable
from gspo_proto.rollout_pb2 import CheckpointDone, Event, GroupsSettled, StepDone, TrainingDone, VersionLive

# Among so many events a starting coordinator finds the newest steps: a step has a handful.
_NUM_NEWEST = 200
# The learner's messages. Those of an epoch below the newest come from a learner that has lost the run.
_OF_LEARNER = (StepDone, GroupsSettled, VersionLive, CheckpointDone, TrainingDone)
log = structlog.get_logger()


class EventFeed:
    """Reads the events from the coordinator's start on, without those of a learner that has lost the run.

    Attributes:
        epoch: The newest learner's, by the events and by its own answers.
    """

    def __init__(self, service: Service) -> None:
        self._redis, self._stream = service.redis, service.keys.events
        self._events = Events(service.redis, service.keys, service.options.name)
        self._position = FROM_START
        self.epoch = 0

    async def start(self) -> list[Message]:
        """Go behind the newest event. Returns the bodies of the newest 200 before it, the newest first."""
        entries = await newest_entries(self._redis, self._stream, _NUM_NEWEST)
        if entries:
            self._position = entries[0][0]
        return [body for _, event in readable(Event, entries) if (body := body_of(event)) is not None]

    async def read(self, block_s: float) -> list[Message]:
        """The bodies of the next events, oldest first; waits `block_s` at most, and returns none then."""
        bodies = []
        for entry, event in await self._events.read(self._position, block_s):
            self._position = entry
            body = body_of(event)
            if event.epoch < self.epoch and isinstance(body, _OF_LEARNER):
                log.warning("old_event", kind=event.WhichOneof("what"), epoch=event.epoch, newest=self.epoch)
                continue
            self.epoch = max(self.epoch, event.epoch)
            if body is not None:
                bodies.append(body)
        return bodies

    async def send(self, event: Event) -> None:
        """Send an event under the newest epoch."""
        event.epoch = self.epoch
        await self._events.send(event)

    def rewind(self) -> None:
        """Read from the start again: Redis was wiped, and its clock may have been set back since."""
        self._position = FROM_START
