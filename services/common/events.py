"""The events stream: what happened in the run, in order, for everyone who watches.

Events are read by position and acknowledged by nobody. Neighbours: keys.py, streams.py.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import structlog
from redis.asyncio import Redis

from gspo_proto.rollout_pb2 import Event, Finished
from services.common.entries import SCHEMA, MalformedEntryError, read_entry
from services.common.keys import EVENTS_KEPT, Keys
from services.common.streams import FIELD

FROM_START = b"0"
log = structlog.get_logger()


class Events:
    """Writes and reads the events of one run.

    Args:
        sender: Name of the service that writes.
    """

    def __init__(self, redis: Redis, keys: Keys, sender: str) -> None:
        self._redis, self._keys, self._sender = redis, keys, sender

    async def send(self, event: Event) -> None:
        """Complete the event's head and append it."""
        event.schema, event.unix_s, event.sender = SCHEMA, time.time(), self._sender
        await self._redis.xadd(
            self._keys.events, {FIELD: event.SerializeToString()}, maxlen=EVENTS_KEPT, approximate=True
        )

    async def read(self, position: bytes, block_s: float, count: int = 256) -> list[tuple[bytes, Event]]:
        """Events after `position` with their own positions; waits `block_s` at most, and returns none then."""
        reply: Any = await self._redis.xread(
            {self._keys.events: position}, count=count, block=max(1, round(block_s * 1000))
        )
        if not reply:
            return []
        return [(entry, _read(entry, fields.get(FIELD, b""))) for entry, fields in reply[0][1]]

    async def follow(self, position: bytes = FROM_START) -> AsyncIterator[Event]:
        """Every event after `position`, for ever; ends with its task."""
        while True:
            found = await self.read(position, block_s=1.0)
            for entry, event in found:
                position = entry
                yield event
            if not found and _number(await self.newest()) < _number(position):
                # Redis was wiped, and its clock may have been set back since: what comes now would lie before.
                position = FROM_START

    async def newest(self) -> bytes:
        """Position of the newest event: what comes after it is new to a service that starts now."""
        found: Any = await self._redis.xrevrange(self._keys.events, count=1)
        return bytes(found[0][0]) if found else FROM_START

    async def until_finished(self, position: bytes) -> Finished:
        """Wait for the end of the run; for a background task, which ends with it.

        `position` is `newest()` of the service's start: a run that is resumed still holds the Finished of its
        earlier life, which must not end it.
        """
        async for event in self.follow(position):
            if event.WhichOneof("what") == "finished":
                return event.finished
        raise AssertionError("follow never ends")  # pragma: no cover


def _number(position: bytes) -> tuple[int, ...]:
    """A position as what it is ordered by."""
    return tuple(int(part) for part in position.split(b"-"))


def _read(entry: bytes, payload: bytes) -> Event:
    """An event; an empty one for bytes that are none, so that whoever follows goes on behind them."""
    try:
        return read_entry(Event, payload)
    except MalformedEntryError as error:
        log.warning("unreadable_event", entry=entry.decode(), reason=str(error))
        return Event()
