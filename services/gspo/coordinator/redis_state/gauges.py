"""What the coordinator shows of Redis in its metrics: who is registered, what waits in the streams, memory.

It decides nothing by them.
"""

from __future__ import annotations

from collections import Counter

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import SERVICES, Keys, consumer_groups
from gspo.common.telemetry import metrics

# What Redis answers of a stream that it lost since the coordinator's last look: it is made again at the next.
_NO_STREAM = "NOGROUP"


async def show(redis: Redis, keys: Keys) -> None:
    """Set the gauges once.

    Raises:
        ResponseError: Redis refuses, for another reason than that it has lost a stream.
    """
    await _update_stream_gauges(redis, keys)
    memory = await redis.info("memory")
    metrics.REDIS_MEMORY.set(memory["used_memory"])
    metrics.REDIS_MEMORY_LIMIT.set(memory["maxmemory"] or memory["total_system_memory"])
    registered = Counter(instance.service for instance in await list_instances(redis, keys))
    for service in SERVICES:
        metrics.INSTANCES.labels(service).set(registered[service])


async def _update_stream_gauges(redis: Redis, keys: Keys) -> None:
    groups = consumer_groups(keys)
    # In one transaction: an entry that is taken in between would be counted as less than none.
    async with redis.pipeline(transaction=True) as pipe:
        for stream, group in groups.items():
            pipe.xlen(stream)
            pipe.xpending(stream, group)
        pipe.xlen(keys.dead)
        *found, num_dead = await pipe.execute(raise_on_error=False)
    metrics.STREAM_ENTRIES.labels(_name(keys.dead)).set(_number(num_dead))
    for stream, length, taken in zip(groups, found[::2], found[1::2], strict=True):
        entries = _number(length)
        metrics.STREAM_ENTRIES.labels(_name(stream)).set(entries)
        metrics.STREAM_UNTAKEN.labels(_name(stream)).set(max(0, entries - _number(taken)))


def _number(answer: int | dict[str, int] | Exception) -> int:
    """Of XLEN or of XPENDING; 0 of a stream that is gone."""
    if isinstance(answer, ResponseError) and str(answer).startswith(_NO_STREAM):
        return 0
    if isinstance(answer, Exception):
        raise answer
    return answer["pending"] if isinstance(answer, dict) else answer


def _name(stream: str) -> str:
    return stream.rpartition(":")[2]
