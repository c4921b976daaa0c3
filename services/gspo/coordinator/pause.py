"""The pause of a run: while it lasts no group is issued, and open groups are finished.

A user pauses and resumes over the HTTP API, which writes the key in Redis; failing scores pause the run too.
"""

from __future__ import annotations

import structlog
from redis.asyncio import Redis

from gspo.common.streams.keys import PAUSED_BY_USER, Keys
from gspo.common.telemetry import metrics

log = structlog.get_logger()


class IssuePause:
    """Follows the pause key in Redis.

    Attributes:
        active: Whether the run is paused.
        reason: Why, where the scorers asked for it; empty for a user's pause.
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._key = redis, keys.paused
        self.active, self.reason = False, ""
        self._requested = ""

    def request(self, reason: str) -> None:
        """Pause at the next `apply`."""
        self._requested = reason

    async def apply(self) -> None:
        """Write a requested pause."""
        if not self._requested:
            return
        self.active, self.reason, self._requested = True, self._requested, ""
        await self._redis.set(self._key, self.reason)
        log.error("paused", reason=self.reason, detail="correct the function, then resume: POST /v1/resume")

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
