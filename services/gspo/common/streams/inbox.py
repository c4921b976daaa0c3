"""Redis streams with leases: one consumer at a time works on an entry, and its results are written once.

A consumer takes an entry, renews its lease while it works, and finishes it in one transaction with the outputs. Every
such write is a script that first checks the entry's owner and number of deliveries, so a consumer whose lease has ended
cannot write. `acknowledge` alone checks nothing: it is for streams with one reader, the learner under its lock and a
fixed name, and the coordinator. Redis counts a reply as delivered that a broken connection has lost. So `take`
compares the entries that Redis counts as this consumer's with those that it received, and returns the others first.
`consumer.py` is the loop over it; `entries.py` knows the meaning of the bytes.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import ResponseError

from gspo.common.errors import MalformedEntryError
from gspo.common.streams.entries import MAX_ENTRY_BYTES, EntryTooLargeError, entry_kinds, make_letter, read_entry
from gspo.common.streams.keys import Keys, consumer_groups
from gspo.common.streams.leases import LEASE
from gspo.common.streams.redis_client import num_broken_off
from gspo.common.streams.saved_states import SAVING, load_states
from gspo.common.streams.token_counts import COUNTING, NO_TOKENS, NOT_COUNTED, EndedTokens, RolloutTokens
from gspo.common.telemetry import metrics

FIELD = b"d"
_PENDING_AT_ONCE = 1000
log = structlog.get_logger()

# KEYS: stream, tokens, rollout_tokens, output streams. ARGV: consumer group, consumer, then for each entry its id,
# deliveries, the six of EndedTokens, number of outputs, and their streams (places in KEYS) with payloads.
# Returns the entries that were ours. One script, so that a burst costs one round trip.
_FINISH = """
local finished, i = {}, 3
while ARGV[i] do
  local first, last = i + 9, i + 8 + 2 * tonumber(ARGV[i + 8])
  if owns(ARGV[i], ARGV[i + 1]) then
    for j = first, last, 2 do redis.call('XADD', KEYS[tonumber(ARGV[j])], '*', 'd', ARGV[j + 1]) end
    finish(ARGV[i])
    settle(KEYS[2], KEYS[3], unpack(ARGV, i + 2, i + 7))
    finished[#finished + 1] = ARGV[i]
  end
  i = last + 1
end
return finished
"""

# KEYS: stream, tokens, rollout_tokens. ARGV: consumer group, then entry and the six of EndedTokens in sevens. A call
# that is repeated finds no entry, and counts nothing.
_ACKNOWLEDGE = """
for i = 2, #ARGV, 7 do
  if finish(ARGV[i]) == 1 then
    settle(KEYS[2], KEYS[3], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], ARGV[i + 6])
  end
end
"""

# KEYS: stream, partial hash, prefix of pieces, tokens, rollout_tokens, output streams. ARGV: consumer group, consumer,
# evaluation, then entry, deliveries, output key, kept, sampled and reported tokens, place of the output's stream in
# KEYS, and payload in eights. Returns 1 for each output whose entry is still ours, else 0. A key that is done already
# means that this output was written by an earlier delivery: the first result wins. Outputs of one entry come together,
# and its lease is checked and renewed once.
_PUT_MANY = """
local kept, ours = {}, {}
for i = 4, #ARGV, 8 do
  local lease = ARGV[i] .. ':' .. ARGV[i + 1]
  if ours[lease] == nil then
    ours[lease] = owns(ARGV[i], ARGV[i + 1]) or false
    if ours[lease] then renew(ARGV[i]) end
  end
  local is_new = ours[lease] and not is_done(KEYS[2], ARGV[i + 2])
  if is_new then
    redis.call('XADD', KEYS[tonumber(ARGV[i + 6])], '*', 'd', ARGV[i + 7])
    set_done(KEYS[2], KEYS[3], ARGV[i + 2])
  end
  report(ARGV[3], KEYS[4], KEYS[5], ARGV[i + 2], lease, ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], is_new and '1')
  kept[#kept + 1] = ours[lease] and 1 or 0
end
return kept
"""

# KEYS: stream. ARGV: consumer group, consumer, then entry and deliveries in pairs. Returns the entries that are still
# ours.
_RENEW = """
local kept = {}
for i = 3, #ARGV, 2 do
  if owns(ARGV[i], ARGV[i + 1]) then
    renew(ARGV[i])
    kept[#kept + 1] = ARGV[i]
  end
end
return kept
"""

# KEYS: stream, partial hash, prefix of pieces, tokens, rollout_tokens. ARGV: consumer group, consumer, evaluation, then
# entry, deliveries, output key, kept, sampled and reported tokens, place of the piece, and state in eights. Returns how
# many were saved. A key that is done stays so: a state that comes after it is late.
_SAVE = """
local num_saved = 0
for i = 4, #ARGV, 8 do
  local lease, place = ARGV[i] .. ':' .. ARGV[i + 1], tonumber(ARGV[i + 6])
  local is_saved = owns(ARGV[i], ARGV[i + 1]) and save(KEYS[2], KEYS[3], ARGV[i + 2], place, ARGV[i + 7])
  num_saved = num_saved + (is_saved and 1 or 0)
  report(ARGV[3], KEYS[4], KEYS[5], ARGV[i + 2], lease, ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], is_saved and '0')
end
return num_saved
"""

# KEYS: stream, open hash, stream it goes to. ARGV: consumer group, consumer, entry, deliveries, payload, field of
# `open` or none. The entry goes to the end of that stream as a new one; if its group has ended meanwhile, it is only
# removed.
_REQUEUE = """
if not owns(ARGV[3], ARGV[4]) then return 0 end
if ARGV[6] == '' or redis.call('HEXISTS', KEYS[2], ARGV[6]) == 1 then
  redis.call('XADD', KEYS[3], '*', 'd', ARGV[5])
end
finish(ARGV[3])
return 1
"""


@dataclass(frozen=True)
class Delivery:
    """One entry under this consumer's lease.

    Attributes:
        num_deliveries: How often the entry was handed out, from 1.
        message: The payload as the message of its stream.
    """

    entry: bytes
    payload: bytes
    num_deliveries: int
    message: Any = None


@dataclass(frozen=True)
class EntryOutput:
    """An output of an entry that stays leased; it is written once under its key."""

    delivery: Delivery
    stream: str
    payload: bytes
    key: str
    tokens: RolloutTokens = NOT_COUNTED


@dataclass(frozen=True)
class EntryState:
    """The saved part of an unfinished output; it stands under the output's key until the output is written.

    Attributes:
        state: The whole state, or a piece of it that follows what this lease has saved before.
        place: That of the piece behind the whole state, from 1; 0 for a whole state.
    """

    delivery: Delivery
    key: str
    state: bytes
    tokens: RolloutTokens = NOT_COUNTED
    place: int = 0


class Inbox:
    """One consumer's view of one stream.

    Args:
        redis: Client with binary replies.
        keys: The run's keys.
        stream: The stream to read; its consumer group follows from it.
        consumer: This consumer's name; no other process has it, unless it alone reads the stream.
        lease_s: After so long without a renewal another consumer may take the entry.
    """

    def __init__(self, redis: Redis, keys: Keys, stream: str, *, consumer: str, lease_s: float) -> None:
        self.stream, self.consumer, self.lease_s = stream, consumer, lease_s
        self._redis, self._keys = redis, keys
        self._stream_exists = False
        # The deliveries that this consumer has received, each with its number; those that have ended go at the next
        # look for lost ones.
        self._received: set[tuple[bytes, int]] = set()
        self._num_broken_off, self._next_look_s = num_broken_off(redis), time.monotonic() + lease_s
        self._consumer_group, self._kind = consumer_groups(keys)[stream], entry_kinds(keys)[stream]
        self._is_evaluation = stream == keys.eval_prompts

    async def take(self, count: int, block_s: float) -> list[Delivery]:
        """Up to `count` new entries; waits `block_s` at most (0 looks once), and returns none then.

        Those of a lost reply come first: it looks for them after a connection was closed, and once in a lease.

        Here and below, an unreadable entry becomes a dead letter and is not returned.
        """
        if lost := await self._take_lost(count):
            return lost
        block_ms = max(1, round(block_s * 1000)) if block_s else None
        reply = await self._read(">", count, block_ms)
        return await self._readable([(entry, fields, 1) for entry, fields in reply])

    async def take_own_pending(self, count: int) -> list[Delivery]:
        """Entries that an earlier process of this consumer's name took and did not finish."""
        return await self._readable(await self._with_deliveries(await self._read("0", count, None)))

    async def reclaim(self, count: int) -> list[Delivery]:
        """Entries whose lease has ended, now leased to this consumer."""
        lease_ms = round(self.lease_s * 1000)
        try:
            _, entries, *_ = await self._redis.xautoclaim(
                self.stream, self._consumer_group, self.consumer, min_idle_time=lease_ms, count=count
            )
        except ResponseError as error:
            self._ignore_missing_stream(error)
            return []
        return await self._readable(await self._with_deliveries(entries))

    async def renew(self, deliveries: Sequence[Delivery]) -> set[bytes]:
        """Renew the leases; returns the entries that are still ours. Work on the others must be dropped."""
        pairs = [value for delivery in deliveries for value in (delivery.entry, delivery.num_deliveries)]
        return set(await self._call(_RENEW, [], pairs)) if deliveries else set()

    async def put(self, outputs: Sequence[EntryOutput]) -> list[bool]:
        """Write outputs, all in one transaction, and keep their entries; a second output under a key is dropped.

        Returns, for each output, whether its entry is still ours.

        Raises:
            EntryTooLargeError: An output is larger than an entry may be.
        """
        if not outputs:
            return []
        if (largest := max(len(output.payload) for output in outputs)) > MAX_ENTRY_BYTES:
            raise EntryTooLargeError(largest)
        streams = list(dict.fromkeys(output.stream for output in outputs))
        args: list[Any] = [int(self._is_evaluation)]
        for output in outputs:
            place = 6 + streams.index(output.stream)
            args += (*_reported(output), place, output.payload)
        kept = await self._call(_PUT_MANY, [*self._saved, *self._ledger, *streams], args)
        return [bool(ours) for ours in kept] if kept else [False] * len(outputs)

    async def save(self, states: Sequence[EntryState]) -> int:
        """Save unfinished outputs, all in one transaction; returns how many were.

        Outputs that are written already, those whose lease is lost, and pieces that nothing precedes are left out.
        """
        if not states:
            return 0
        args: list[Any] = [int(self._is_evaluation)]
        for item in states:
            args += (*_reported(item), item.place, item.state)
        return int(await self._call(_SAVE, [*self._saved, *self._ledger], args) or 0)

    async def load(self, output_keys: Sequence[str]) -> list[bytes | None]:
        """For each key its newest state: DONE where the output was written, None where there is none."""
        return await load_states(self._redis, self._keys, output_keys)

    async def requeue(self, delivery: Delivery, *, stream: str = "", group: int | None = None) -> bool:
        """Put the entry to the end of its stream, or of another, for any consumer to take.

        With a `group`, the entry is only removed where that group has ended. Returns whether the entry was still ours;
        otherwise nothing was done.
        """
        field = "" if group is None else str(group)
        args = [delivery.entry, delivery.num_deliveries, delivery.payload, field]
        return bool(await self._call(_REQUEUE, [self._keys.open, stream or self.stream], args))

    async def has(self, delivery: Delivery) -> bool:
        """Whether the entry is still in its stream, under this lease or another."""
        return bool(await self._redis.xrange(self.stream, delivery.entry, delivery.entry, count=1))

    async def num_untaken(self) -> int:
        """Entries that no consumer has taken."""
        try:
            pending: Any = await self._redis.xpending(self.stream, self._consumer_group)
        except ResponseError as error:
            self._ignore_missing_stream(error)
            return 0
        return int(await self._redis.xlen(self.stream)) - int(pending["pending"])

    async def finish(
        self, delivery: Delivery, outputs: Iterable[tuple[str, bytes]] = (), tokens: EndedTokens = NO_TOKENS
    ) -> bool:
        """Write the outputs (stream, payload) and acknowledge the entry in one transaction.

        Returns whether the entry was still ours; otherwise nothing was written.
        """
        return bool(await self._finish([(delivery, list(outputs), tokens)]))

    async def dead_letter(
        self,
        delivery: Delivery,
        reason: str,
        outputs: Iterable[tuple[str, bytes]] = (),
        tokens: EndedTokens = NO_TOKENS,
    ) -> bool:
        """Finish an entry as a dead letter, with the outputs, in one transaction; whether it was still ours."""
        name = self.stream.rpartition(":")[2]
        letter = make_letter(
            name,
            delivery.payload,
            delivery.message,
            reason=reason,
            by=self.consumer,
            num_deliveries=delivery.num_deliveries,
        )
        if not await self.finish(delivery, [*outputs, (self._keys.dead, letter)], tokens):
            return False
        metrics.DEAD_LETTERS.labels(name).inc()
        log.error("dead_letter", stream=name, entry=delivery.entry.decode(), reason=reason, look="gspo deadletter list")
        return True

    async def finish_many(self, stream: str, outputs: Sequence[tuple[Delivery, bytes]]) -> set[bytes]:
        """Finish many entries with one output each, all in one transaction.

        Returns the entries that were still ours; of the others nothing was written.
        """
        return await self._finish([(delivery, [(stream, payload)], NO_TOKENS) for delivery, payload in outputs])

    async def _finish(self, entries: Sequence[tuple[Delivery, list[tuple[str, bytes]], EndedTokens]]) -> set[bytes]:
        keys = [self.stream, *self._ledger]
        keys += dict.fromkeys(stream for _, outputs, _ in entries for stream, _ in outputs)
        args: list[Any] = []
        for delivery, outputs, tokens in entries:
            args += (delivery.entry, delivery.num_deliveries, *tokens.args, len(outputs))
            for stream, payload in outputs:
                args += (keys.index(stream, 3) + 1, payload)
        return set(await self._call(_FINISH, keys[1:], args)) if entries else set()

    async def acknowledge(self, entries: Iterable[tuple[Delivery, EndedTokens]]) -> None:
        """Acknowledge entries whose outcome is safe elsewhere (on disk), for the only reader of the stream.

        Args:
            entries: Each with its tokens, which are counted if it was still there.
        """
        args = [value for delivery, tokens in entries for value in (delivery.entry, *tokens.args)]
        if args:
            await self._script(_ACKNOWLEDGE)(keys=[self.stream, *self._ledger], args=[self._consumer_group, *args])

    @property
    def _saved(self) -> list[str]:
        return [self._keys.partial, self._keys.pieces]

    @property
    def _ledger(self) -> list[str]:
        return [self._keys.tokens, self._keys.rollout_tokens]

    def _script(self, text: str) -> AsyncScript:
        return self._redis.register_script(LEASE + COUNTING + SAVING + text)

    async def _call(self, text: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """The reply of a script; an empty one where the stream does not exist, and so no lease."""
        lease = [self._consumer_group, self.consumer]
        try:
            return await self._script(text)(keys=[self.stream, *keys], args=[*lease, *args])
        except ResponseError as error:
            self._ignore_missing_stream(error)
            return []

    async def _readable(self, entries: Iterable[tuple[bytes, dict[bytes, bytes], int]]) -> list[Delivery]:
        """The entries with their messages; an unreadable one becomes a dead letter."""
        entries, deliveries = list(entries), []
        self._received.update((entry, num_deliveries) for entry, _, num_deliveries in entries)
        for entry, fields, num_deliveries in entries:
            payload = fields.get(FIELD, b"")
            try:
                deliveries.append(Delivery(entry, payload, num_deliveries, read_entry(self._kind, payload)))
            except MalformedEntryError as error:
                await self.dead_letter(Delivery(entry, payload, num_deliveries), str(error))
        return deliveries

    async def _with_deliveries(
        self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]
    ) -> list[tuple[bytes, dict[bytes, bytes], int]]:
        """The entries that are ours and still exist, each with how often it was handed out."""
        ours = []
        for entry, fields in entries:
            pending: Any = await self._redis.xpending_range(
                self.stream, self._consumer_group, entry, entry, 1, self.consumer
            )
            if fields and pending:
                ours.append((entry, fields, int(pending[0]["times_delivered"])))
        return ours

    async def _take_lost(self, count: int) -> list[Delivery]:
        """Up to `count` entries that Redis has delivered to this consumer in replies that it never received.

        They come with the number of that delivery, which has not begun.
        """
        num = num_broken_off(self._redis)
        if num == self._num_broken_off and time.monotonic() < self._next_look_s:
            return []
        pending = await self._pending()
        self._received.intersection_update(pending)
        lost = [delivery for delivery in pending if delivery not in self._received]
        if len(lost) <= count:
            self._num_broken_off, self._next_look_s = num, time.monotonic() + self.lease_s
        self._received.update(lost[:count])  # also where its entry is deleted: it is not looked for again
        entries = []
        for entry, num_deliveries in lost[:count]:
            still_there: Any = await self._redis.xrange(self.stream, entry, entry)
            entries += [(entry, fields, num_deliveries) for _, fields in still_there]
        deliveries = await self._readable(entries)
        kept = await self.renew(deliveries)
        if kept:
            log.warning("lost_reply", stream=self.stream.rpartition(":")[2], num=len(kept), detail="taken again")
        return [delivery for delivery in deliveries if delivery.entry in kept]

    async def _pending(self) -> list[tuple[bytes, int]]:
        """Every delivery that Redis counts as this consumer's: the entry and its number of deliveries."""
        pending: list[tuple[bytes, int]] = []
        start = b"-"
        while True:
            try:
                page: Any = await self._redis.xpending_range(
                    self.stream, self._consumer_group, start, "+", _PENDING_AT_ONCE, self.consumer
                )
            except ResponseError as error:
                self._ignore_missing_stream(error)
                return []
            pending += [(item["message_id"], item["times_delivered"]) for item in page]
            if len(page) < _PENDING_AT_ONCE:
                return pending
            start = b"(" + pending[-1][0]

    async def _read(self, position: str, count: int, block_ms: int | None) -> list[tuple[bytes, dict[bytes, bytes]]]:
        try:
            reply: Any = await self._redis.xreadgroup(
                self._consumer_group, self.consumer, {self.stream: position}, count=count, block=block_ms
            )
        except ResponseError as error:
            self._ignore_missing_stream(error)
            await create_consumer_groups(self._redis, self._keys)
            return []
        self._stream_exists = True
        return reply[0][1] if reply else []

    def _ignore_missing_stream(self, error: ResponseError) -> None:
        """Ignore the lack of a stream or group: it is not created yet, or Redis was wiped."""
        if "NOGROUP" not in str(error):
            raise error
        if self._stream_exists:
            log.warning("stream_missing", detail=str(error), cause="Redis has lost it; it is made again")
            self._stream_exists = False
        else:
            log.debug("stream_not_made_yet", detail=str(error))


def _reported(item: EntryOutput | EntryState) -> tuple[Any, ...]:
    """The arguments that outputs and states have in common."""
    delivery, tokens = item.delivery, item.tokens
    counts = tokens.num_kept, tokens.num_sampled, tokens.num_reported
    return delivery.entry, delivery.num_deliveries, item.key, *counts


def new_consumer_name(service: str) -> str:
    """Make a consumer name that no other process has."""
    return f"{service}-{uuid.uuid4().hex[:12]}"


async def create_consumer_groups(redis: Redis, keys: Keys) -> None:
    """Make every stream and its consumer group; existing ones stay as they are."""
    for stream, consumer_group in consumer_groups(keys).items():
        try:
            await redis.xgroup_create(stream, consumer_group, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise


async def append(redis: Redis, stream: str, payloads: Iterable[bytes]) -> None:
    """Add entries to a stream in one transaction. Never with MAXLEN: it would drop pending entries too."""
    async with redis.pipeline(transaction=True) as pipe:
        for payload in payloads:
            pipe.xadd(stream, {FIELD: payload})
        await pipe.execute()
