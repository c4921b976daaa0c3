"""Redis' answers with their types, bytes: redis-py types each for all protocols and decodings at once."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from gspo.cli.dead_letters import letters
from gspo.common.streams.inbox import FIELD
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import DeadLetter


async def stream_entries(redis: Redis, stream: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of a stream, the oldest first."""
    entries: Any = await redis.xrange(stream)
    return list(entries)


async def payloads(redis: Redis, stream: str) -> list[bytes]:
    """The payloads of a stream's entries, the oldest first."""
    return [fields[FIELD] for _, fields in await stream_entries(redis, stream)]


async def dead_letters(redis: Redis, keys: Keys) -> list[DeadLetter]:
    """Every dead letter, the oldest first; each can be read."""
    stored = [item.letter for item in await letters(redis, keys)]
    readable = [letter for letter in stored if letter is not None]
    assert len(readable) == len(stored)
    return readable
