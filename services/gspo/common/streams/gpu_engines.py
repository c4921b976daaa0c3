"""The engines of vLLM on shared GPUs (`placement: shared`): which processes may hold memory there.

A heartbeat says too little: a process that was stopped has none, and keeps its memory. So each engine has a record from
before its start until its process has ended. The generator writes it, and again with every heartbeat, so that it
outlives a wipe of Redis. It goes with the generator's orderly end, or when the supervisor has ended all that was left.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

from redis.asyncio import Redis

from gspo.common.host.module_command import SUPERVISOR_VARIABLE
from gspo.common.streams.keys import Keys

# KEYS: shift, engines. ARGV: uid, record. Returns 1 if the generator may start its engine.
_MAY_START = """
if redis.call('HGET', KEYS[1], 'side') ~= 'generation' then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
"""


@dataclass(frozen=True)
class GpuEngine:
    """The engine of one generator.

    Attributes:
        name: The generator's.
        host: Where it runs.
        is_supervised: Whether a supervisor removes the record after the end of the process.
    """

    name: str
    host: str
    is_supervised: bool

    @classmethod
    def of_this_process(cls, name: str) -> GpuEngine:
        """The engine of the generator `name`, which is this process."""
        return cls(name, socket.gethostname(), SUPERVISOR_VARIABLE in os.environ)


class GpuEngines:
    """The records of one run."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._may_start = redis.register_script(_MAY_START)

    async def may_start(self, uid: str, engine: GpuEngine) -> bool:
        """Whether a generator may start its engine now: in the generators' shift, with its record written at once.

        So a learner that takes the GPUs misses no start.
        """
        keys, words = [self._keys.shift, self._keys.gpu_engines], [uid, json.dumps(asdict(engine))]
        return bool(await self._may_start(keys=keys, args=words))

    async def keep(self, uid: str, engine: GpuEngine) -> None:
        """Write the record of an engine that was started."""
        await self._redis.hset(self._keys.gpu_engines, uid, json.dumps(asdict(engine)))

    async def read(self) -> dict[str, GpuEngine]:
        """The uid of each generator with an engine, and its record."""
        records: Any = await self._redis.hgetall(self._keys.gpu_engines)
        return {uid.decode(): GpuEngine(**json.loads(record)) for uid, record in records.items()}

    async def forget(self, *uids: str) -> None:
        """Remove the records of engines that have no memory any more."""
        if uids:
            await self._redis.hdel(self._keys.gpu_engines, *uids)

    async def forget_process(self, name: str) -> None:
        """Remove the records of a generator whose processes have all ended."""
        await self.forget(*(uid for uid, engine in (await self.read()).items() if engine.name == name))
