"""The events stream: the course of the run, in order, for every service and command that follows it.

Events are read by position and never acknowledged.
"""

import time
from collections.abc import AsyncIterator
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from gspo.common.errors import MalformedEntryError
from gspo.common.streams.entries import SCHEMA, body_of, make_letter, read_entry
from gspo.common.streams.inbox import FIELD
from gspo.common.streams.keys import EVENTS_KEPT, Keys
from gspo.common.telemetry import metrics
from gspo_proto.rollout_pb2 import Event, Finished

FROM_START = b"0"
log = structlog.get_logger()

# KEYS: events, dead. ARGV: entry, letter. Of all its readers, only the first removes the entry and writes the letter.
_REMOVE_UNREADABLE = """
local first = redis.call('XDEL', KEYS[1], ARGV[1])
if first == 1 then redis.call('XADD', KEYS[2], '*', 'd', ARGV[2]) end
return first
"""


class Events:
    """Writes and reads the events of one run.

    Args:
        sender: Name of the service that writes.
        epoch: The learner's, in every event that it writes; others set it in an event where they know it.
    """

    def __init__(self, redis: Redis, keys: Keys, sender: str, *, epoch: int = 0) -> None:
        self._redis, self._keys, self._sender, self._epoch = redis, keys, sender, epoch
        self._remove_unreadable = redis.register_script(_REMOVE_UNREADABLE)

    async def send(self, event: Event) -> None:
        """Complete the event's head and append it."""
        event.schema, event.unix_s, event.sender = SCHEMA, time.time(), self._sender
        event.epoch = event.epoch or self._epoch
        await self._redis.xadd(
            self._keys.events, {FIELD: event.SerializeToString()}, maxlen=EVENTS_KEPT, approximate=True
        )

    async def read(self, position: bytes, block_s: float, count: int = 256) -> list[tuple[bytes, Event]]:
        """Events after `position` with their own positions; waits `block_s` at most, and returns none then.

        An unreadable one becomes a dead letter, and is an empty event here, so that its readers continue after it.
        """
        reply: Any = await self._redis.xread(
            {self._keys.events: position}, count=count, block=max(1, round(block_s * 1000))
        )
        if not reply:
            return []
        return [(entry, await self._event(entry, fields.get(FIELD, b""))) for entry, fields in reply[0][1]]

    async def follow(self, position: bytes = FROM_START) -> AsyncIterator[Event]:
        """Every event after `position`, for ever; ends with its task."""
        while True:
            events = await self.read(position, block_s=1.0)
            for entry, event in events:
                position = entry
                yield event
            if not events and _number(await self.newest()) < _number(position):
                # Redis was wiped, and its clock may have been set back: new events may lie before the position.
                position = FROM_START

    async def newest(self) -> bytes:
        """Position of the newest event: later ones are new to a service that starts now."""
        try:
            stream: Any = await self._redis.xinfo_stream(self._keys.events)
        except ResponseError:
            return FROM_START
        return bytes(stream["last-generated-id"])

    async def wait_for_finished(self, position: bytes) -> Finished:
        """Wait for the end of the run; for a background task, which ends with it.

        `position` is `newest()` of the service's start: a resumed run still has the Finished of its earlier
        session, which must not end it.
        """
        async for event in self.follow(position):
            if isinstance(finished := body_of(event), Finished):
                return finished
        raise AssertionError("follow never ends")  # pragma: no cover

    async def _event(self, entry: bytes, payload: bytes) -> Event:
        try:
            return read_entry(Event, payload)
        except MalformedEntryError as error:
            letter = make_letter("events", payload, None, reason=str(error), by=self._sender, num_deliveries=1)
            if await self._remove_unreadable(keys=[self._keys.events, self._keys.dead], args=[entry, letter]):
                metrics.DEAD_LETTERS.labels("events").inc()
                log.error("dead_letter", stream="events", entry=entry.decode(), reason=str(error))
            return Event()


def _number(position: bytes) -> tuple[int, ...]:
    """A position in a form that is ordered."""
    return tuple(int(part) for part in position.split(b"-"))
