"""Reads, retries and drops the dead letters of a run: entries that a service gave up, with time and reason.

A letter is written in the transaction that removes the entry from its stream. `retry` puts the entry back exactly once,
and only while its group is open: a settled group is never trained again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.inbox import FIELD
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import DeadLetter

Retried: TypeAlias = Literal["sent", "settled", "gone"]

# KEYS: dead, the stream of the entry, open. ARGV: letter, payload, group or '' if it has no group to check.
# The call that removes the letter writes the entry, so two concurrent retries write it once.
_RETRY = """
if ARGV[3] ~= '' and redis.call('HEXISTS', KEYS[3], ARGV[3]) == 0 then return 'settled' end
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 'gone' end
redis.call('XADD', KEYS[2], '*', 'd', ARGV[2])
return 'sent'
"""


@dataclass(frozen=True)
class DeadLetterEntry:
    """An entry of the stream `dead`; `letter` is None if its bytes are not a letter."""

    entry: str
    letter: DeadLetter | None


async def letters(redis: Redis, keys: Keys) -> list[DeadLetterEntry]:
    """Every letter, the oldest first."""
    reply: Any = await redis.xrange(keys.dead)
    return [DeadLetterEntry(entry.decode(), _read(fields.get(FIELD, b""))) for entry, fields in reply]


def _read(payload: bytes) -> DeadLetter | None:
    try:
        letter = DeadLetter.FromString(payload)
    except DecodeError:
        return None
    return letter if letter.schema == SCHEMA and letter.stream else None


async def retry(redis: Redis, keys: Keys, dead: DeadLetterEntry) -> Retried:
    """Put an entry back into its stream: `sent`, or the reason why not (its group is `settled`, the letter `gone`)."""
    letter = dead.letter
    if letter is None:
        return "gone"
    # Only the coordinator knows whether an evaluation is still in flight: it has no slots and no settlement.
    group = str(letter.group) if letter.HasField("group") and not letter.evaluation else ""
    answer: Any = await redis.register_script(_RETRY)(
        keys=[keys.dead, keys.stream(letter.stream), keys.open], args=[dead.entry, letter.payload, group]
    )
    retried: Retried = answer.decode()
    return retried


async def drop(redis: Redis, keys: Keys, entries: Iterable[str]) -> int:
    """Remove letters for good; returns how many existed."""
    names = list(entries)
    return int(await redis.xdel(keys.dead, *names)) if names else 0
