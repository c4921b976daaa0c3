"""The shift on shared GPUs (`placement: shared`): either the generators have the memory of the GPUs, or the learner.

The learner alone changes it, and a learner of a higher epoch takes it over. It is in Redis, so it outlives every
process. A generator starts its engine in the generators' shift alone (gpu_engines.py).
"""

import time
from dataclasses import dataclass
from typing import Any, Literal

from redis.asyncio import Redis

from gspo.common.streams.keys import Keys

Side = Literal["generation", "learning"]

Written = Literal["refused", "first", "again"]

# KEYS: shift. ARGV: epoch, side, purpose, Unix seconds. Returns a word of Written.
_SET = """
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch and tonumber(epoch) > tonumber(ARGV[1]) then return 'refused' end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'side', ARGV[2], 'purpose', ARGV[3], 'since_unix_s', ARGV[4])
return epoch and 'again' or 'first'
"""


@dataclass(frozen=True)
class Shift:
    """A shift.

    Attributes:
        purpose: Why the learner has its shift, such as "step 5".
    """

    epoch: int
    side: Side
    purpose: str
    since_unix_s: float


class GpuShift:
    """The shift of one run."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._set = redis.register_script(_SET)

    async def write(self, shift: Shift) -> Written:
        """Write a shift again or a new one.

        Returns:
            "refused" if a learner of a higher epoch has the run, "first" if there was no shift, as after a wipe of
            Redis, else "again".
        """
        fields = [shift.epoch, shift.side, shift.purpose, shift.since_unix_s]
        written: Written = (await self._set(keys=[self._keys.shift], args=fields)).decode()
        return written

    async def read(self) -> Shift | None:
        """The present shift; None before the first, and after a wipe of Redis until the learner writes it again."""
        fields: Any = await self._redis.hgetall(self._keys.shift)
        if not fields:
            return None
        side: Side = "learning" if fields[b"side"] == b"learning" else "generation"
        return Shift(int(fields[b"epoch"]), side, fields[b"purpose"].decode(), float(fields[b"since_unix_s"]))


def new_shift(epoch: int, side: Side, purpose: str = "") -> Shift:
    return Shift(epoch, side, purpose, time.time())
