"""Who is in the run: every process registers in Redis with a heartbeat, and finds the others there.

It is the only directory of addresses; nothing is configured twice. Neighbours: keys.py, activity.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from redis.asyncio import Redis

from services.common.activity import Activity
from services.common.keys import HEARTBEAT_S, MEMBER_TTL_S, Keys


@dataclass(frozen=True)
class Member:
    """One process of the run.

    `facts` holds what the service adds: a generator its version, digest and dtype.
    """

    service: str
    name: str
    http: str = ""
    grpc: str = ""
    pid: int = 0
    activity: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    beat_unix_s: float = 0.0


class Registration:
    """Keeps one member's heartbeat.

    Args:
        facts: Called at every beat.
    """

    def __init__(
        self, redis: Redis, keys: Keys, member: Member, activity: Activity, facts: Callable[[], dict[str, Any]]
    ) -> None:
        self._redis, self._keys, self._member, self._activity, self._facts = redis, keys, member, activity, facts

    async def beat(self) -> None:
        """Write one heartbeat now, as after a change that others wait for."""
        self._activity.set(self._activity.kind, self._activity.what, self._activity.detail)
        member = asdict(self._member) | {
            "activity": self._activity.describe(),
            "facts": self._facts(),
            "beat_unix_s": time.time(),
        }
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.sadd(self._keys.members, f"{self._member.service}:{self._member.name}")
            pipe.set(self._key, json.dumps(member), ex=MEMBER_TTL_S)
            await pipe.execute()

    async def run(self) -> None:
        """Beat until cancelled; then leave."""
        try:
            while True:
                await self.beat()
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            await self._redis.delete(self._key)
            await self._redis.srem(self._keys.members, f"{self._member.service}:{self._member.name}")

    @property
    def _key(self) -> str:
        return self._keys.member(self._member.service, self._member.name)


async def members(redis: Redis, keys: Keys, service: str | None = None) -> list[Member]:
    """Every living member, or those of one service, by name."""
    registered: Any = await redis.smembers(keys.members)
    names = sorted(name.decode() for name in registered)
    wanted = [name.split(":", 1) for name in names if service is None or name.startswith(f"{service}:")]
    if not wanted:
        return []
    found = await redis.mget([keys.member(of, name) for of, name in wanted])
    return [Member(**json.loads(text)) for text in found if text]


async def wait_for_member(redis: Redis, keys: Keys, service: str, timeout_s: float) -> Member:
    """The first living member of a service.

    Raises:
        TimeoutError: None has registered within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := await members(redis, keys, service):
            return found[0]
        await asyncio.sleep(0.2)
    raise TimeoutError(f"no {service} registered within {timeout_s:g} s")
