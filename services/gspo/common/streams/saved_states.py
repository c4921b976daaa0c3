"""The saved states of rollouts in flight in Redis: a whole state in the hash `partial`, and a list of pieces behind it.

A piece has the tokens that were sampled since the save before, so the bytes of all saves grow as the answer does. Those
of whole states would grow as its square, in the network and in the file of Redis. Protobuf reads a state and the pieces
behind it as one message, whose mask is too short; entries.py completes it.
"""

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from gspo.common.streams.keys import Keys

# The value of an output's key in the hash `partial`, once the output is written.
DONE = b"done"

# For scripts with the hash and the prefix of the lists. `place` is that of a piece in its list, from 1, and 0 for a
# whole state. A piece whose predecessors are not there is refused, and its writer saves a whole state next. A call that
# is repeated after a broken connection appends once.
SAVING = """
local function is_done(partial, key)
  return redis.call('HSTRLEN', partial, key) == 4 and redis.call('HGET', partial, key) == 'done'
end
local function save(partial, pieces, key, place, state)
  if is_done(partial, key) then return false end
  if place == 0 then
    redis.call('HSET', partial, key, state)
    redis.call('DEL', pieces .. key)
    return true
  end
  local num = redis.call('LLEN', pieces .. key)
  if num == place then return redis.call('LINDEX', pieces .. key, -1) == state end
  if num ~= place - 1 or redis.call('HEXISTS', partial, key) == 0 then return false end
  redis.call('RPUSH', pieces .. key, state)
  return true
end
local function set_done(partial, pieces, key)
  redis.call('HSET', partial, key, 'done')
  redis.call('DEL', pieces .. key)
end
local function remove_saved(partial, pieces, key)
  redis.call('HDEL', partial, key)
  redis.call('DEL', pieces .. key)
end
"""

# KEYS: partial, prefix of the pieces. ARGV: keys of rollouts.
_LOAD = """
local states = {}
for i, key in ipairs(ARGV) do
  local state = redis.call('HGET', KEYS[1], key)
  states[i] = state and state .. table.concat(redis.call('LRANGE', KEYS[2] .. key, 0, -1))
end
return states
"""
_REMOVE = SAVING + "for _, key in ipairs(ARGV) do remove_saved(KEYS[1], KEYS[2], key) end"


async def load_states(redis: Redis, keys: Keys, rollouts: Sequence[str]) -> list[bytes | None]:
    """The newest state of each rollout, all of one moment: DONE where its output was written, None where there is none.

    Args:
        rollouts: Their keys.
    """
    if not rollouts:
        return []
    states: Any = await redis.register_script(_LOAD)(keys=[keys.partial, keys.pieces], args=list(rollouts))
    return list(states)


async def remove_states(redis: Redis, keys: Keys, rollouts: Sequence[str]) -> None:
    """Remove the states of rollouts, also those of outputs that were written."""
    if rollouts:
        await redis.register_script(_REMOVE)(keys=[keys.partial, keys.pieces], args=list(rollouts))
