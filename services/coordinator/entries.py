"""Looking at a stream without taking anything from it.

Taking work is services/common/streams.py's. Neighbours: issuer.py, evaluation.py and views.py look.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from services.common.events import FROM_START
from services.common.streams import FIELD


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


def _payloads(reply: Any) -> list[tuple[bytes, bytes]]:
    return [(entry, fields[FIELD]) for entry, fields in reply]
