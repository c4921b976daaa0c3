"""The rollouts that agents play, in Redis: open or leased to a worker, with all turns and the result.

Every gateway of a run reads and writes the same. A rollout is an entry of the stream `agent_tasks`, and a hash: its
task, its entry and attempt, its worker, its result. A list beside it has the turns of its conversation. The secret of
the worker's key is the consumer that has the entry, so that a worker whose lease has ended can write nothing. A write
whose reply is lost with its connection is made again, so each has the same effect if it is made twice.
"""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from gspo.common.streams.keys import GATEWAY, Keys, rollout_key
from gspo.common.streams.leases import LEASE
from gspo.common.streams.token_counts import COUNTING
from gspo_proto.agent_pb2 import AgentResult, TurnEntry
from gspo_proto.rollout_pb2 import GroupTask

# A rollout of a run that has ended without removing it expires after this.
_KEPT_S, _REPEATED_S = 24 * 3600, 600
# An entry of one sampled token takes some 60 bytes. Contexts, their texts and cancelled requests are beside them.
LEAST_ROLLOUT_BYTES, BYTES_A_TOKEN = 64 << 20, 256

# The beginning of the two scripts without a worker: the first of them finds no consumer group. KEYS: stream, hash or
# its prefix. ARGV: consumer group.
_CREATE_GROUP = "redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')"

# ARGV: consumer group, name, seconds, then fields and values. A rollout that another gateway has opened stays.
_OPEN = """
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('HSET', KEYS[2], 'entry', redis.call('XADD', KEYS[1], '*', 'd', ARGV[2]), unpack(ARGV, 4))
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""

# KEYS: stream, prefix of the hashes, hash of the open groups. ARGV: consumer group, secret, then fields and values of
# the lease. Rollouts of groups that have ended are passed over. A look at an empty stream makes no consumer of the
# secret's name, and a call that is repeated gives the same rollout.
_LEASE = """
local mine = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])[1]
if mine then return redis.call('XRANGE', KEYS[1], mine[1], mine[1])[1][2][2] end
while true do
  local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], 'lease', 'COUNT', 1, 'STREAMS', KEYS[1], '>')
  if not reply then return false end
  local entry, name = reply[1][2][1][1], reply[1][2][1][2][2]
  local group = redis.call('HGET', KEYS[2] .. name, 'group')
  if group and (group == '' or redis.call('HEXISTS', KEYS[3], group) == 1) then
    renew(entry)
    redis.call('HSET', KEYS[2] .. name, 'free', redis.call('HGET', KEYS[2] .. name, 'budget'), unpack(ARGV, 3))
    return name
  end
  finish(entry)
end
"""

# The beginning of the scripts below. KEYS: stream, hash, turns. ARGV: consumer group, secret. A rollout that is opened
# again is another entry, so each is handed out once.
_NOT_PLAYED = -1
_PLAYS = f"""
local entry = redis.call('HGET', KEYS[2], 'entry')
if not entry or not owns(entry, 1) then return {_NOT_PLAYED} end
"""

_READ = "return redis.call('HGETALL', KEYS[2])"

# ARGV: consumer group, secret, milliseconds of silence.
_RENEW = "renew(entry, ARGV[3]) return 1"

# KEYS: stream, hash, turns, finished. ARGV: consumer group, secret, result, seconds, text of the key `finished` for so
# long. The session goes with its rollout, perhaps before a worker without the reply asks again.
_FINISH = """
finish(entry)
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], 'result', ARGV[3])
redis.call('SETEX', KEYS[4], ARGV[4], ARGV[5])
return 1
"""

# KEYS: stream, hash, turns, tokens, rollout_tokens, hash of the open groups. ARGV: consumer group, secret, seconds,
# entry, name, sampled tokens, 1 for an evaluation, field of the turn's entries, number of this one, bytes of all
# entries at most. Tokens of a group that has ended are counted, and no rollout has them.
_TOO_LARGE = -3
_APPEND = f"""
local group = redis.call('HGET', KEYS[2], 'group')
local has_ended = group ~= '' and redis.call('HEXISTS', KEYS[6], group) == 0
if tonumber(redis.call('HGET', KEYS[2], ARGV[8]) or 0) > tonumber(ARGV[9]) then
  return has_ended and {_NOT_PLAYED} or 1
end
local size = string.len(ARGV[4])
if redis.call('HINCRBY', KEYS[2], 'bytes', size) > tonumber(ARGV[10]) then
  redis.call('HINCRBY', KEYS[2], 'bytes', -size)
  return {_TOO_LARGE}
end
redis.call('HSET', KEYS[2], ARGV[8], ARGV[9] + 1)
if has_ended then
  local _, before = rollout_tokens(KEYS[5], ARGV[5])
  refuse(KEYS[4], KEYS[5], ARGV[5], ARGV[2], before + ARGV[6], before)
  return {_NOT_PLAYED}
end
renew(entry)
redis.call('RPUSH', KEYS[3], ARGV[4])
redis.call('EXPIRE', KEYS[3], ARGV[3])
if ARGV[7] == '1' then
  add(KEYS[4], 'evaluation', tonumber(ARGV[6]))
else
  local kept, sampled = rollout_tokens(KEYS[5], ARGV[5])
  record(KEYS[4], KEYS[5], ARGV[5], ARGV[2], kept + ARGV[6], sampled + ARGV[6], sampled, '0')
end
return 1
"""

# The tokens that a request in flight may yet use are in a field of their own, which names the gateway of the request.
# If it dies, they are free again. ARGV: consumer group, secret, tokens of the context, tokens of the answer at most,
# that field, prefix of the gateways' heartbeats. Returns the tokens that the answer may have.
_RESERVED = "reserved:"
_NONE_FREE, _ALL_RESERVED = 0, -2
_RESERVE = f"""
local free = tonumber(redis.call('HGET', KEYS[2], 'free')) - ARGV[3]
if free < 1 then return {_NONE_FREE} end
for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
  local gateway = field ~= ARGV[5] and string.match(field, '^{_RESERVED}(%w+):')
  if gateway and redis.call('EXISTS', ARGV[6] .. gateway) == 1 then
    free = free - redis.call('HGET', KEYS[2], field)
  elseif gateway then
    redis.call('HDEL', KEYS[2], field)
  end
end
if free < 1 then return {_ALL_RESERVED} end
local granted = math.min(free, tonumber(ARGV[4]))
redis.call('HSET', KEYS[2], ARGV[5], ARGV[3] + granted)
return granted
"""

# ARGV: consumer group, secret, temperature. Returns 1 if it is that of all the rollout's requests so far.
_AGREE = """
redis.call('HSETNX', KEYS[2], 'temperature', ARGV[3])
return redis.call('HGET', KEYS[2], 'temperature') == ARGV[3] and 1 or 0
"""

# ARGV: consumer group, secret, field of a request, tokens that it has used, field of its entries: without any it has
# used none.
_SETTLE = """
redis.call('HDEL', KEYS[2], ARGV[3])
if redis.call('HDEL', KEYS[2], ARGV[5]) == 1 then
  redis.call('HSET', KEYS[2], 'free', redis.call('HGET', KEYS[2], 'free') - ARGV[4])
end
return 1
"""

# KEYS: stream, hash, turns, tokens, rollout_tokens. ARGV: consumer group, name, time of a lease in milliseconds. Opens
# a rollout again if its worker was silent for so long.
_REOPEN = f"""
local entry = redis.call('HGET', KEYS[2], 'entry')
local lease = entry and redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], entry, entry, 1)[1]
if not lease then return 0 end
finish(entry)
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], lease[2])
redis.call('HDEL', KEYS[2], 'worker', 'temperature', 'bytes')
for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
  if string.find(field, '^{_RESERVED}') then redis.call('HDEL', KEYS[2], field) end
end
redis.call('DEL', KEYS[3])
redis.call('HSET', KEYS[2], 'entry', redis.call('XADD', KEYS[1], '*', 'd', ARGV[2]))
if select(5, rollout_tokens(KEYS[5], ARGV[2])) then
  record(KEYS[4], KEYS[5], ARGV[2], 'reopened', 0, 0, 0, '0')
end
return redis.call('HINCRBY', KEYS[2], 'attempt', 1)
"""


class SessionLostError(Exception):
    """The key is of no rollout that is played: its lease has ended, or the rollout has."""

    def __init__(self) -> None:
        super().__init__("this key plays no rollout: its lease has ended, or the rollout is finished")


class RolloutTooLargeError(Exception):
    """The requests of a rollout have more bytes than Redis shall hold for one, cancelled requests included."""


@dataclass(frozen=True)
class Session:
    """A rollout that a worker plays.

    Attributes:
        key: The worker's key: the rollout's name and the secret of this attempt. Others see the name alone.
        attempt: How often the rollout was handed out, from 1.
        began_unix_s: Time at which the worker got it.
        temperature: That of its requests, where agents choose it (agent.sampling); None before the first.
    """

    key: str
    task: GroupTask
    number: int
    attempt: int
    began_unix_s: float
    temperature: float | None = None

    @property
    def name(self) -> str:
        """The rollout's name, as in `partial`."""
        return rollout_key(self.task.group, self.number, self.task.evaluation)

    @property
    def variables(self) -> dict[str, Any]:
        """Those of the chat template, from the task's data; a request may set others. Tools are the request's alone."""
        variables = json.loads(self.task.prompt.template_json or "{}")
        return {name: value for name, value in variables.items() if name != "tools"}


@dataclass(frozen=True)
class PlayedRollout:
    """A rollout as the gateway that has its task sees it.

    Attributes:
        session: With the worker that plays or played it; None while it is open.
        result: That of a rollout that has ended.
        is_unknown: It is not in Redis.
    """

    session: Session | None
    result: AgentResult | None
    worker: str
    is_unknown: bool


class SessionStore:
    """Reads and writes the rollouts of one run.

    Calls with a worker's key raise SessionLostError where it plays no rollout, or not any more.

    Args:
        lease_s: A worker that is silent for so long loses its rollout.
        uid: This gateway's.
        most_bytes: Limit of all that is written of a rollout's turns.
    """

    def __init__(
        self, redis: Redis, keys: Keys, lease_s: float, uid: str, *, most_bytes: int = LEAST_ROLLOUT_BYTES
    ) -> None:
        self._redis, self._keys, self._uid = redis, keys, uid
        self._stream, self._lease_ms, self._most_bytes = keys.agent_tasks, round(lease_s * 1000), most_bytes

    async def open(self, task: GroupTask, number: int, free_tokens: int) -> None:
        """Offer a rollout to workers, unless it is open or played already.

        Args:
            free_tokens: Tokens that it may have, with the contexts of its branches.
        """
        name = rollout_key(task.group, number, task.evaluation)
        fields: dict[str, Any] = {
            "task": task.SerializeToString(),
            "number": number,
            "attempt": 1,
            "group": "" if task.evaluation else str(task.group),
            "budget": free_tokens,
        }
        await self._script(_CREATE_GROUP, _OPEN)(
            [self._stream, self._hash(name)], [GATEWAY, name, _KEPT_S, *_flat(fields)]
        )

    async def lease(self, worker: str) -> Session | None:
        """The rollout that is open longest, for a worker to play; None while there is none."""
        secret, fields = secrets.token_urlsafe(24), {"worker": worker, "began": time.time()}
        keys = [self._stream, self._hash(""), self._keys.open]
        name = await self._script(_CREATE_GROUP, _LEASE)(keys, [GATEWAY, secret, *_flat(fields)])
        return None if name is None else await self.session(f"{name.decode()}.{secret}")

    async def session(self, key: str) -> Session:
        """The rollout of a worker's key."""
        values = await self._run(_READ, key)
        return _session(key, dict(zip(values[::2], values[1::2], strict=True)))

    async def renew(self, key: str) -> None:
        """Renew the lease."""
        await self._run(_RENEW, key, 0)

    async def release(self, key: str) -> None:
        """End the lease now, as its time would: another worker may play the rollout from its beginning."""
        await self._run(_RENEW, key, self._lease_ms)

    async def finish(self, key: str, result: AgentResult) -> None:
        """Write the result, which ends the rollout. The same result may be written again."""
        name, secret = _parts(key)
        finished, sent = self._finished(name), f"{secret} {result.reward!r}"
        args = result.SerializeToString(), _REPEATED_S, sent
        try:
            await self._run(_FINISH, key, *args, more_keys=(finished,))
        except SessionLostError:
            if await self._redis.get(finished) != sent.encode():
                raise

    async def append(self, key: str, entry: TurnEntry, number: int) -> None:
        """Write a part of a turn, and renew the lease.

        Args:
            number: Place among the turn's entries, from 0: each is written once.

        Raises:
            SessionLostError: Also where the rollout's group has ended.
            RolloutTooLargeError: It has used up its bytes.
        """
        name, num_tokens = _parts(key)[0], len(entry.tokens.token_ids)
        args = _KEPT_S, entry.SerializeToString(), name, num_tokens, int(":" in name)
        place = _written(entry.turn), number, self._most_bytes
        more_keys = [*self._ledger, self._keys.open]
        if await self._run(_APPEND, key, *args, *place, more_keys=more_keys) == _TOO_LARGE:
            raise RolloutTooLargeError(
                f"the requests of this rollout have {self._most_bytes} bytes together, the most that are kept. "
                "Finish the task"
            )

    async def reserve(self, key: str, turn: str, context_tokens: int, answer_tokens: int) -> int | None:
        """Hold tokens for a request; the tokens that its answer may have.

        Returns:
            0 if finished requests have used them all; None if requests in flight hold the rest.
        """
        gateways = self._keys.instance(GATEWAY, "")
        args = [context_tokens, answer_tokens, self._reserved(turn), gateways]
        granted = await self._run(_RESERVE, key, *args)
        return None if granted == _ALL_RESERVED else int(granted)

    async def settle(self, key: str, turn: str, used_tokens: int) -> None:
        """End what `reserve` holds for a request.

        Args:
            used_tokens: Tokens of its context and its answer; 0 if the rollout does not have them.
        """
        await self._run(_SETTLE, key, self._reserved(turn), used_tokens, _written(turn))

    async def agree(self, key: str, temperature: float) -> bool:
        """Note the temperature of a request; returns whether all requests of the rollout have had it."""
        return bool(await self._run(_AGREE, key, repr(temperature)))

    async def turns(self, name: str) -> list[TurnEntry]:
        """All that is written of a rollout's turns."""
        entries: Any = await self._redis.lrange(self._turns(name), 0, -1)
        return [TurnEntry.FromString(entry) for entry in entries]

    async def played(self, names: Sequence[str]) -> list[PlayedRollout]:
        """How far some rollouts are."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hgetall(self._hash(name))
            rows: Any = await pipeline.execute()
        return [_played(name, fields) for name, fields in zip(names, rows, strict=True)]

    async def reopen(self, name: str) -> int:
        """Open a rollout again if its worker's lease has ended; returns the number of the new attempt, else 0."""
        keys = [self._stream, self._hash(name), self._turns(name), *self._ledger]
        return int(await self._script(_REOPEN)(keys, [GATEWAY, name, self._lease_ms]))

    async def forget(self, names: Sequence[str]) -> None:
        """Remove rollouts, which ends the leases of their workers."""
        if names:
            await self._redis.delete(*map(self._hash, names), *map(self._turns, names))

    def _script(self, *parts: str) -> AsyncScript:
        return self._redis.register_script("".join([LEASE, COUNTING, *parts]))

    async def _run(self, text: str, key: str, *args: Any, more_keys: Sequence[str] = ()) -> Any:
        """The reply of a script that begins with `_PLAYS`."""
        name, secret = _parts(key)
        keys = [self._stream, self._hash(name), self._turns(name), *more_keys]
        reply = await self._script(_PLAYS, text)(keys, [GATEWAY, secret, *args])
        if reply == _NOT_PLAYED:
            raise SessionLostError
        return reply

    @property
    def _ledger(self) -> list[str]:
        return [self._keys.tokens, self._keys.rollout_tokens]

    def _reserved(self, turn: str) -> str:
        return f"{_RESERVED}{self._uid}:{turn}"

    def _hash(self, name: str) -> str:
        return self._keys.key(f"agent:{name}")

    def _finished(self, name: str) -> str:
        return self._keys.key(f"agent_finished:{name}")

    def _turns(self, name: str) -> str:
        return self._keys.key(f"agent_turns:{name}")


def _parts(key: str) -> tuple[str, str]:
    """The rollout's name and the secret of a worker's key."""
    name, _, secret = key.rpartition(".")
    return name, secret


def _written(turn: str) -> str:
    """The field with the number of a turn's entries, until the turn is settled."""
    return f"written:{turn}"


def _flat(fields: dict[str, Any]) -> list[Any]:
    return [value for pair in fields.items() for value in pair]


def _session(key: str, fields: dict[bytes, bytes]) -> Session:
    task, number = GroupTask.FromString(fields[b"task"]), int(fields[b"number"])
    temperature = float(fields[b"temperature"]) if b"temperature" in fields else None
    return Session(key, task, number, int(fields[b"attempt"]), float(fields[b"began"]), temperature)


def _played(name: str, fields: dict[bytes, bytes]) -> PlayedRollout:
    session = _session(name, fields) if b"worker" in fields else None
    result = AgentResult.FromString(fields[b"result"]) if b"result" in fields else None
    return PlayedRollout(session, result, fields.get(b"worker", b"").decode(), not fields)
