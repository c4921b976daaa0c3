"""The counts of the token ledger in Redis, which the scripts of rollouts change in their own transactions.

The hash `tokens` has the columns of gspo.runlog.token_ledger. The hash `rollout_tokens` has a field for each rollout in
flight: the tokens of its unfinished state, those that its writer has sampled so far, the tokens and the number of its
results on their way, and the writer. A writer is one lease of a generator, so a call that is repeated after a broken
connection counts once. A rollout has two results where its group was issued again after the first: the learner trains
one, and the tokens of the other are superseded.

Generators report the tokens that their engines return. `settle` and `abandon` get numbers that learner and coordinator
counted in the arrays, and remove those of the generators: both sides meet in a difference of 0.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from gspo.common.streams.keys import Keys
from gspo.common.streams.saved_states import SAVING

# For scripts with these two hashes. `done` is '1' for a result and '0' for a state, and false where Redis refuses them.
# Tokens of evaluations are counted alone.
COUNTING = """
local function add(tokens, column, num)
  if num ~= 0 then redis.call('HINCRBY', tokens, column, num) end
end
local function rollout_tokens(hash, key)
  local kept, sampled, ended, num_ended, writer = string.match(
    redis.call('HGET', hash, key) or '', '^(%d+) (%d+) (%d+) (%d+) (.*)$')
  return tonumber(kept or 0), tonumber(sampled or 0), tonumber(ended or 0), tonumber(num_ended or 0), writer
end
local function write(hash, key, kept, sampled, ended, num_ended, writer)
  redis.call('HSET', hash, key, string.format('%d %d %d %d %s', kept, sampled, ended, num_ended, writer))
end
local function write_or_remove(hash, key, kept, sampled, ended, num_ended, writer)
  if kept == 0 and num_ended == 0 then
    redis.call('HDEL', hash, key)
  else
    write(hash, key, kept, sampled, ended, num_ended, writer)
  end
end
local function since(hash, key, writer, sampled, before)
  local _, recorded, _, _, last = rollout_tokens(hash, key)
  return sampled - (last == writer and recorded or before)
end
local function record(tokens, hash, key, writer, kept, sampled, before, done)
  local new = since(hash, key, writer, sampled, before)
  local was_kept, _, ended, num_ended = rollout_tokens(hash, key)
  if done == '1' then
    write(hash, key, 0, sampled, ended + kept, num_ended + 1, writer)
  else
    write(hash, key, kept, sampled, ended, num_ended, writer)
  end
  add(tokens, 'generated', new)
  add(tokens, 'in_flight', kept - was_kept)
  add(tokens, 'superseded', new - kept + was_kept)
end
local function refuse(tokens, hash, key, writer, sampled, before)
  local new = math.max(0, since(hash, key, writer, sampled, before))
  add(tokens, 'generated', new)
  add(tokens, 'superseded', new)
end
local function report(is_evaluation, tokens, hash, key, writer, kept, sampled, before, done)
  if is_evaluation == '1' then
    add(tokens, 'evaluation', sampled - before)
  elseif done then
    record(tokens, hash, key, writer, kept, sampled, before, done)
  else
    refuse(tokens, hash, key, writer, sampled, before)
  end
end
-- The last result takes all that generators reported: a number of the learner's that differs shows in the ledger.
local function settle(tokens, hash, key, column, num, masked_column, num_masked, if_recorded)
  local kept, sampled, ended, num_ended, writer = rollout_tokens(hash, key)
  if key == '' or (num_ended == 0 and if_recorded == '1') then return end
  local gone = num_ended > 1 and math.min(ended, num + num_masked) or ended
  write_or_remove(hash, key, kept, sampled, ended - gone, math.max(0, num_ended - 1), writer)
  add(tokens, 'in_flight', -gone)
  add(tokens, column, tonumber(num))
  if masked_column ~= '' then add(tokens, masked_column, tonumber(num_masked)) end
end
"""

# KEYS: partial, prefix of pieces, tokens, rollout_tokens. ARGV: rollout key and tokens of its saved state in pairs, -1
# where none can be read. A result is on its way to the learner, which counts it.
_ABANDON = (
    COUNTING
    + SAVING
    + """
local tokens, hash = KEYS[3], KEYS[4]
for i = 1, #ARGV, 2 do
  local kept, sampled, ended, num_ended, writer = rollout_tokens(hash, ARGV[i])
  if writer and (kept > 0 or num_ended == 0) then
    local num = tonumber(ARGV[i + 1])
    add(tokens, 'unfinished', num < 0 and kept or num)
    add(tokens, 'in_flight', -kept)
    write_or_remove(hash, ARGV[i], 0, sampled, ended, num_ended, writer)
  end
  remove_saved(KEYS[1], KEYS[2], ARGV[i])
end
"""
)

# KEYS: tokens, rollout_tokens. ARGV: rollout key and column in pairs.
_CLOSE = (
    COUNTING
    + """
local tokens, hash = KEYS[1], KEYS[2]
for i = 1, #ARGV, 2 do
  local kept, sampled, ended, num_ended, writer = rollout_tokens(hash, ARGV[i])
  if num_ended > 0 then
    add(tokens, ARGV[i + 1], ended)
    add(tokens, 'in_flight', -ended)
    write_or_remove(hash, ARGV[i], kept, sampled, 0, 0, writer)
  end
end
"""
)


@dataclass(frozen=True)
class RolloutTokens:
    """The tokens of a rollout as its generator counts them.

    Attributes:
        num_kept: Sampled tokens in its state or result.
        num_sampled: Tokens that were sampled for it under this lease, with those that it dropped.
        num_reported: `num_sampled` of the last report that was answered.
    """

    num_kept: int = 0
    num_sampled: int = 0
    num_reported: int = 0


# Of an output without tokens.
NOT_COUNTED = RolloutTokens()


@dataclass(frozen=True)
class EndedTokens:
    """The tokens of a rollout that has ended, as the learner counts them.

    Attributes:
        key: The rollout's.
        column: Where its tokens go.
        masked_column: Column of a trained rollout's tokens that are not in the loss.
        if_recorded: Count it only while Redis has the generator's report: a second entry of a rollout may be its dead
            letter, which a user put back.
    """

    key: str
    column: str
    num: int
    masked_column: str = ""
    num_masked: int = 0
    if_recorded: bool = False

    @property
    def args(self) -> tuple[Any, ...]:
        """For `settle`."""
        return self.key, self.column, self.num, self.masked_column, self.num_masked, int(self.if_recorded)


# The arguments of no rollout: an entry without tokens.
NO_TOKENS = EndedTokens("", "", 0)


async def abandon(redis: Redis, keys: Keys, rollouts: Sequence[tuple[str, int | None]]) -> None:
    """Remove the states of rollouts whose group has ended; count the tokens of those that were unfinished.

    Args:
        rollouts: Key, and sampled tokens of the saved state; None where there is none.
    """
    args = [value for key, num in rollouts for value in (key, -1 if num is None else num)]
    hashes = [keys.partial, keys.pieces, keys.tokens, keys.rollout_tokens]
    await redis.register_script(_ABANDON)(keys=hashes, args=args)


async def close(redis: Redis, keys: Keys, column_of: Callable[[int], str]) -> None:
    """Count the finished rollouts that the learner has not received when the run ends; scorers may still have them.

    Their tokens are those that the generators reported. An entry that comes later finds no report, and counts nothing.

    Args:
        column_of: The column of a group's late rollouts; empty where they stay in flight.
    """
    reported: Any = await redis.hkeys(keys.rollout_tokens)
    columns = [(key, column_of(int(key.partition(b"-")[0]))) for key in reported]
    if args := [value for key, column in columns if column for value in (key, column)]:
        await redis.register_script(_CLOSE)(keys=[keys.tokens, keys.rollout_tokens], args=args)


async def read_counts(redis: Redis, keys: Keys) -> tuple[str, dict[str, int]]:
    """The account, which is the redis epoch, and its counts, of one moment; an empty account while Redis has none."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.get(keys.redis_epoch)
        pipe.hgetall(keys.tokens)
        epoch, counts = await pipe.execute()
    return (epoch or b"").decode(), {name.decode(): int(num) for name, num in counts.items()}


def num_sampled(version: Iterable[int]) -> int:
    """Sampled tokens among those with these versions; observations have -1."""
    return sum(sampled_by >= 0 for sampled_by in version)
