"""Whether Redis still is the one that the streams were made in: a wipe or a lost disk shows in a mark.

What is issued again then is loop.py's. Neighbour: services/gspo/common/streams/inbox.py makes the streams.
"""

from __future__ import annotations

import uuid

from redis.asyncio import Redis

from gspo.common.streams.inbox import create_consumer_groups
from gspo.common.streams.keys import Keys


class RedisEpoch:
    """Makes the streams, and notices that they are gone."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._redis_epoch: bytes | str | None = None

    async def open(self) -> None:
        """Make the streams that are not there, and leave a mark where there is none."""
        await create_consumer_groups(self._redis, self._keys)
        await self._redis.set(self._keys.redis_epoch, uuid.uuid4().hex, nx=True)
        self._redis_epoch = await self._redis.get(self._keys.redis_epoch)

    async def was_wiped(self) -> bool:
        """Whether the mark is gone or another since the last call; the streams are there again then."""
        if await self._redis.get(self._keys.redis_epoch) == self._redis_epoch:
            return False
        await self.open()
        return True
