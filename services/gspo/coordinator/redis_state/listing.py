"""Looking at a stream without taking anything from it.

Taking work is services/gspo/common/streams/inbox.py's.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

from redis.asyncio import Redis

from gspo.common.streams.entries import MalformedEntryError, read_entry
from gspo.common.streams.events import FROM_START
from gspo.common.streams.inbox import FIELD

_Kind = TypeVar("_Kind")


async def all_entries(redis: Redis, stream: str) -> list[tuple[bytes, bytes]]:
    """(entry, payload) of everything in the stream, the oldest first."""
    return _payloads(await redis.xrange(stream))


async def newest_entries(redis: Redis, stream: str, count: int) -> list[tuple[bytes, bytes]]:
    """(entry, payload) of the newest `count`, the newest first."""
    return _payloads(await redis.xrevrange(stream, count=count))


async def newest_position(redis: Redis, stream: str) -> bytes:
    """Position after which everything still to come lies."""
    newest = await newest_entries(redis, stream, 1)
    return newest[0][0] if newest else FROM_START


def readable(kind: type[_Kind], entries: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, _Kind]]:
    """(entry, message) of those that can be read; whoever takes the others buries them."""
    found = []
    for entry, payload in entries:
        with suppress(MalformedEntryError):
            found.append((entry, read_entry(kind, payload)))
    return found


def _payloads(reply: Any) -> list[tuple[bytes, bytes]]:
    return [(entry, fields.get(FIELD, b"")) for entry, fields in reply]
