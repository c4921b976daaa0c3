"""The coordinator's view of Redis: the epoch of its contents, the pause, the entries of a stream, the gauges.

Reading here leases nothing; services/gspo/common/streams/inbox.py takes entries.
"""

import uuid
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from gspo.common.errors import MalformedEntryError
from gspo.common.streams.entries import read_entry
from gspo.common.streams.inbox import FIELD, create_consumer_groups
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import PAUSED_BY_USER, SERVICES, Keys, consumer_groups
from gspo.common.telemetry import metrics

# How Redis refuses XPENDING for a stream that a wipe removed; the streams are made again within a second.
_NO_STREAM = "NOGROUP"
_Kind = TypeVar("_Kind")
log = structlog.get_logger()


class RedisEpoch:
    """Makes the streams, and notices a wipe of Redis by its epoch: a random key that is written once."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._epoch: bytes | str | None = None

    async def open(self) -> None:
        """Make the missing streams, write the epoch where there is none, and remember it."""
        await create_consumer_groups(self._redis, self._keys)
        await self._redis.set(self._keys.redis_epoch, uuid.uuid4().hex, nx=True)
        self._epoch = await self._redis.get(self._keys.redis_epoch)

    async def was_wiped(self) -> bool:
        """Whether the epoch is missing or another one since the last call; makes the streams again then."""
        if await self._redis.get(self._keys.redis_epoch) == self._epoch:
            return False
        await self.open()
        return True


class IssuePause:
    """The pause of a run, a key in Redis: while it lasts no group is issued, and open groups are finished.

    A user pauses and resumes over the HTTP API, which writes the key; failing scores pause the run too.

    Attributes:
        active: Whether the run is paused.
        reason: Why, where the scorers asked for it; empty for a user's pause.
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._key = redis, keys.paused
        self.active, self.reason = False, ""

    async def begin(self, reason: str) -> None:
        """Pause because the scorers asked for it."""
        self.active, self.reason = True, reason
        await self._redis.set(self._key, reason)
        log.error("paused", reason=reason, detail="correct the function, then resume: POST /v1/resume")

    async def refresh(self) -> None:
        """Read the key, which a user may have set or removed."""
        value = await self._redis.get(self._key)
        self.active = value is not None
        self.reason = value.decode() if isinstance(value, bytes) and value != PAUSED_BY_USER else ""
        metrics.PAUSED.set(self.active)

    async def restore(self) -> None:
        """Write the key again after a wipe of Redis."""
        if self.active:
            await self._redis.set(self._key, self.reason or PAUSED_BY_USER)


async def all_entries(redis: Redis, stream: str) -> list[tuple[bytes, bytes]]:
    """(entry, payload) of everything in the stream, the oldest first."""
    return _payloads(await redis.xrange(stream))


async def newest_entries(redis: Redis, stream: str, count: int) -> list[tuple[bytes, bytes]]:
    """(entry, payload) of the newest `count`, the newest first."""
    return _payloads(await redis.xrevrange(stream, count=count))


def readable(kind: type[_Kind], entries: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, _Kind]]:
    """(entry, message) of the valid ones; the stream's consumers dead-letter the others."""
    messages = []
    for entry, payload in entries:
        with suppress(MalformedEntryError):
            messages.append((entry, read_entry(kind, payload)))
    return messages


async def update_gauges(redis: Redis, keys: Keys) -> None:
    """Set the metrics of the streams, of Redis's memory and of the registered instances.

    Raises:
        ResponseError: Redis refuses, for another reason than a missing stream.
    """
    groups = consumer_groups(keys)
    # In one transaction: an entry leased between the two reads would make the difference negative.
    async with redis.pipeline(transaction=True) as pipe:
        for stream, group in groups.items():
            pipe.xlen(stream)
            pipe.xpending(stream, group)
        pipe.xlen(keys.dead)
        *counts, num_dead = map(_number, await pipe.execute(raise_on_error=False))
    metrics.STREAM_ENTRIES.labels(_name(keys.dead)).set(num_dead)
    for stream, length, pending in zip(groups, counts[::2], counts[1::2], strict=True):
        metrics.STREAM_ENTRIES.labels(_name(stream)).set(length)
        metrics.STREAM_UNTAKEN.labels(_name(stream)).set(max(0, length - pending))
    memory = await redis.info("memory")
    metrics.REDIS_MEMORY.set(memory["used_memory"])
    metrics.REDIS_MEMORY_LIMIT.set(memory["maxmemory"] or memory["total_system_memory"])
    registered = Counter(instance.service for instance in await list_instances(redis, keys))
    for service in SERVICES:
        metrics.INSTANCES.labels(service).set(registered[service])


def _number(reply: int | dict[str, int] | Exception) -> int:
    """The number in a reply to XLEN or XPENDING; 0 for a missing stream."""
    if isinstance(reply, ResponseError) and str(reply).startswith(_NO_STREAM):
        return 0
    if isinstance(reply, Exception):
        raise reply
    return reply["pending"] if isinstance(reply, dict) else reply


def _name(stream: str) -> str:
    return stream.rpartition(":")[2]


def _payloads(reply: Any) -> list[tuple[bytes, bytes]]:
    return [(entry, fields.get(FIELD, b"")) for entry, fields in reply]
