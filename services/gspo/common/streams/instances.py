"""The instances of a run: every process registers in Redis with a heartbeat, and reads there where the others are.

It is the only directory of addresses; nothing is configured twice. The name is the process's place in the run, the uid
is the process: replicas in containers share a name, and so do a killed process and its successor.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from redis.asyncio import Redis

from gspo.common.streams.keys import HEARTBEAT_S, INSTANCE_TTL_S, Keys
from gspo.common.telemetry.activity import Activity


@dataclass(frozen=True)
class Instance:
    """One process of the run.

    `facts` holds what the service adds: a generator its version, digest and dtype. `uid` is of no other process.
    `grpc` is empty while it starts, and of a service without a gRPC server.
    """

    service: str
    name: str
    http: str = ""
    grpc: str = ""
    pid: int = 0
    activity: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    beat_unix_s: float = 0.0
    uid: str = field(default_factory=lambda: uuid.uuid4().hex[:12])


class Registration:
    """Keeps one instance's heartbeat.

    Args:
        facts: Called at every beat.
    """

    def __init__(
        self, redis: Redis, keys: Keys, instance: Instance, activity: Activity, facts: Callable[[], dict[str, Any]]
    ) -> None:
        self._redis, self._keys, self._instance, self._activity, self._facts = redis, keys, instance, activity, facts
        self._entry, self._key = f"{instance.service}:{instance.uid}", keys.instance(instance.service, instance.uid)

    async def open(self, grpc: str, facts: Callable[[], dict[str, Any]]) -> None:
        """Register the gRPC address of a service that has started, and the facts that it adds."""
        self._instance, self._facts = replace(self._instance, grpc=grpc), facts
        await self.beat()

    async def beat(self) -> None:
        """Write one heartbeat now, as after a change that others wait for."""
        self._activity.set(self._activity.kind, self._activity.what, self._activity.detail)
        instance = asdict(self._instance) | {
            "activity": self._activity.describe(),
            "facts": self._facts(),
            "beat_unix_s": time.time(),
        }
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.sadd(self._keys.instances, self._entry)
            pipe.set(self._key, json.dumps(instance), ex=INSTANCE_TTL_S)
            await pipe.execute()

    async def run(self) -> None:
        """Beat until cancelled; then leave."""
        try:
            while True:
                await self.beat()
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            await self._redis.delete(self._key)
            await self._redis.srem(self._keys.instances, self._entry)


async def list_instances(redis: Redis, keys: Keys, service: str | None = None) -> list[Instance]:
    """Every instance with a heartbeat, or those of one service: by service and name, of one name the newest first."""
    registered: Any = await redis.smembers(keys.instances)
    entries = [entry.decode().split(":", 1) for entry in registered]
    chosen = [(of, uid) for of, uid in entries if service in (None, of)]
    if not chosen:
        return []
    heartbeats = await redis.mget([keys.instance(of, uid) for of, uid in chosen])
    if gone := [f"{of}:{uid}" for (of, uid), text in zip(chosen, heartbeats, strict=True) if not text]:
        # A process that was only silent for long registers again with its next beat.
        await redis.srem(keys.instances, *gone)
    alive = [instance for text in heartbeats if text and (instance := _read(text))]
    return sorted(alive, key=lambda instance: (instance.service, instance.name, -instance.beat_unix_s))


def _read(text: bytes | str) -> Instance | None:
    """The instance of a heartbeat; None where it is malformed, and nothing could be called."""
    try:
        return Instance(**json.loads(text))
    except (ValueError, TypeError):
        return None


async def wait_for_instance(redis: Redis, keys: Keys, service: str, timeout_s: float) -> Instance:
    """The first instance of a service that can be called: one that is starting has no gRPC address yet.

    Raises:
        TimeoutError: None has registered within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if callable_ones := [instance for instance in await list_instances(redis, keys, service) if instance.grpc]:
            return callable_ones[0]
        await asyncio.sleep(0.2)
    raise TimeoutError(f"no {service} registered within {timeout_s:g} s")
