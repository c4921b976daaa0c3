"""From the bytes of a stream entry to its message, or to its error: unknown schema, cut off, other bytes, too large.

Also what a dead letter, an event and an environment's task say. Nothing here talks to Redis.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from gspo.common.errors import MalformedEntryError
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import (
    RUN_END_COMPLETED,
    RUN_END_FAILED,
    RUN_END_STOPPED,
    DeadLetter,
    Event,
    GroupFailure,
    GroupTask,
    Outcome,
    Prompt,
    Rollout,
    RolloutState,
    RunEnd,
    Score,
    Scored,
    ScoredRollout,
)

SCHEMA = 1
# The arrays of sampled tokens, in every message that has some.
_Sampled: TypeAlias = Literal["token_ids", "logp", "version", "kept_sizes", "kept_ids"]
SAMPLED: tuple[_Sampled, ...] = ("token_ids", "logp", "version", "kept_sizes", "kept_ids")
# A group of long rollouts stays well below this; it is also what gRPC takes.
MAX_ENTRY_BYTES = 64 * 2**20
# Rows of the log hold ids as int64, and counts as int32.
_MAX_ID, _MAX_COUNT = 2**63 - 1, 2**31 - 1
# Rollouts of one group: far beyond any use, and few enough to be asked for at once.
MAX_GROUP_SIZE = 4096
# Of an entry that is too large, a dead letter keeps the beginning: it stays in Redis until a user drops it.
_KEPT_BYTES = 64 * 2**10
_Message = TypeVar("_Message", bound=Any)


class EntryTooLargeError(Exception):
    """An entry is larger than any consumer takes, and perhaps than Redis does: writing it again would not help."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes} bytes, and an entry has at most {MAX_ENTRY_BYTES}")


def entry_kinds(keys: Keys) -> dict[str, type[Any]]:
    """Stream -> the message type of its entries."""
    return {
        keys.prompts: GroupTask,
        keys.paused_prompts: GroupTask,
        keys.eval_prompts: GroupTask,
        keys.rollouts: Rollout,
        keys.eval_rollouts: Rollout,
        keys.scored: Scored,
        keys.eval_scored: Scored,
    }


def group_failure(task: GroupTask, reason: str) -> bytes:
    """The entry of `scored` that settles a group whose rollouts cannot be had."""
    failure = GroupFailure(group=task.group, attempt=task.attempt, reason=reason)
    return Scored(schema=SCHEMA, failure=failure).SerializeToString()


def read_entry(kind: type[_Message], payload: bytes) -> _Message:
    """The message.

    Raises:
        MalformedEntryError: Names the problem of the bytes.
    """
    name = kind.DESCRIPTOR.name
    if len(payload) > MAX_ENTRY_BYTES:
        raise MalformedEntryError(f"{len(payload)} bytes, and an entry has at most {MAX_ENTRY_BYTES}", "too_large")
    try:
        message: _Message = kind.FromString(payload)
    except DecodeError as error:
        raise MalformedEntryError(f"{len(payload)} bytes that are no {name}: {error}", "undecodable") from error
    check_message(message)
    return message


def saved_state(payload: bytes | None) -> RolloutState | None:
    """The saved state of a rollout; None where there is no readable one, and the rollout begins anew.

    The pieces behind a whole state have no mask, since the policy sampled all their tokens.
    """
    if not payload or len(payload) > MAX_ENTRY_BYTES:
        return None
    with suppress(DecodeError, MalformedEntryError):
        state = RolloutState.FromString(payload)
        state.mask += b"\x01" * (len(state.token_ids) - len(state.mask))
        check_message(state)
        return state
    return None


def tokens_between(tokens: Any, first: int, last: int | None = None) -> dict[str, Any]:
    """The arrays of some tokens by name, of a message or an object that has those of sampled tokens."""
    begin, end = sum(tokens.kept_sizes[:first]), sum(tokens.kept_sizes[:last])
    arrays = {name: list(getattr(tokens, name)[first:last]) for name in SAMPLED if name != "kept_ids"}
    return arrays | {"kept_ids": list(tokens.kept_ids[begin:end])}


def append_sampled(message: RolloutState | Rollout, tokens: Any) -> None:
    """Append tokens of the policy, of a message or an object that has the arrays of sampled tokens."""
    for name in SAMPLED:
        getattr(message, name).extend(getattr(tokens, name))
    message.mask += b"\x01" * len(tokens.token_ids)


def append_context(message: RolloutState | Rollout, token_ids: Sequence[int], *, keep_sets: bool) -> None:
    """Append tokens that the policy did not sample: they get mask 0, log-prob 0 and version -1."""
    num = len(token_ids)
    message.token_ids.extend(token_ids)
    message.logp.extend([0.0] * num)
    message.version.extend([-1] * num)
    message.kept_sizes.extend([0] * num * keep_sets)
    message.mask += b"\x00" * num


def scored_entry(rollout: bytes, score: Score) -> bytes:
    """The entry of `scored` for the entry of a rollout, whose bytes go in unchanged.

    Protobuf merges concatenated fields, so the rollout is not parsed and serialized again.
    """
    scored = _field(ScoredRollout.ROLLOUT_FIELD_NUMBER, rollout) + ScoredRollout(score=score).SerializeToString()
    return Scored(schema=SCHEMA).SerializeToString() + _field(Scored.ROLLOUT_FIELD_NUMBER, scored)


def _field(number: int, payload: bytes) -> bytes:
    """A field of bytes or of a message on the wire: its number and kind in one byte, its length, its content."""
    length, rest = bytearray(), len(payload)
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes((number << 3 | 2, *length, rest)) + payload


def check_message(message: Any) -> None:
    """Refuse a message of another schema number, or one that contradicts itself.

    Raises:
        MalformedEntryError: Says why.
    """
    if message.schema != SCHEMA:
        raise MalformedEntryError(f"schema {message.schema}, and this version reads {SCHEMA}", "schema")
    if problem := _problem(message):
        raise MalformedEntryError(f"a {message.DESCRIPTOR.name} that cannot be: {problem}")


def _problem(message: Any) -> str:
    """The contradiction in a message, which random bytes may parse as; empty where there is none."""
    if isinstance(message, GroupTask):
        lacks = {
            "no rollouts": not message.num_rollouts,
            "no prompt": not message.prompt.token_ids,
            f"more than {MAX_GROUP_SIZE} rollouts": message.num_rollouts > MAX_GROUP_SIZE,
            "an id or a count beyond what the log holds": _too_big(message),
        }
        return ", ".join(text for text, lacking in lacks.items() if lacking)
    if isinstance(message, Rollout):
        return _rollout_problem(message)
    if isinstance(message, Scored):
        return _scored_problem(message)
    if isinstance(message, RolloutState):
        lengths = {len(message.token_ids), len(message.logp), len(message.version), len(message.mask)}
        return "arrays of unlike length" if len(lengths) > 1 else kept_problem(message)
    return ""


def kept_problem(message: RolloutState | Rollout) -> str:
    """Why the sets of tokens that were kept do not fit the tokens; empty where they do, or where there are none."""
    num_sizes, num_tokens = len(message.kept_sizes), len(message.token_ids)
    if num_sizes not in (0, num_tokens):
        return f"the sizes of {num_sizes} sets for {num_tokens} tokens"
    if (num_ids := sum(message.kept_sizes)) != len(message.kept_ids):
        return f"sets of {num_ids} tokens together, and {len(message.kept_ids)} ids"
    return ""


def _scored_problem(scored: Scored) -> str:
    what = scored.WhichOneof("what")
    if what is None:
        return "neither a rollout nor a failure"
    if what == "failure":
        return "an id or a count beyond what the log holds" if _too_big(scored.failure) else ""
    return _rollout_problem(scored.rollout.rollout)


def _rollout_problem(rollout: Rollout) -> str:
    """A problem that would end the training. The learner checks the arrays (`rollout_limits.py`)."""
    if _too_big(rollout):
        return "an id or a count beyond what the log holds"
    if rollout.outcome not in Outcome.values():
        return f"an outcome {rollout.outcome} that this version does not know"
    return ""


def _too_big(message: Any) -> bool:
    return bool(message.group > _MAX_ID or message.attempt > _MAX_COUNT)


def make_letter(stream: str, payload: bytes, message: Any, *, reason: str, by: str, num_deliveries: int) -> bytes:
    """The entry of `dead`.

    Args:
        stream: Name of the stream that the entry was in, without the run's prefix.
        message: The message of the payload; None where it is unreadable.
        num_deliveries: How often it was handed out.
    """
    letter = DeadLetter(
        schema=SCHEMA,
        stream=stream,
        payload=payload if len(payload) <= MAX_ENTRY_BYTES else payload[:_KEPT_BYTES],
        reason=reason,
        by=by,
        num_deliveries=num_deliveries,
        unix_s=time.time(),
    )
    _name(letter, message)
    return letter.SerializeToString()


def _name(letter: DeadLetter, message: Any) -> None:
    """Write the group and the number of a readable entry into its dead letter."""
    if isinstance(message, GroupTask):
        letter.group, letter.evaluation = message.group, message.evaluation
    elif isinstance(message, Rollout):
        letter.group, letter.number, letter.evaluation = message.group, message.number, message.evaluation
    elif isinstance(message, Scored) and message.WhichOneof("what") == "rollout":
        _name(letter, message.rollout.rollout)
    elif isinstance(message, Scored):
        letter.group = message.failure.group


def task_json(prompt: Prompt) -> str:
    """The task of an environment's `reset`, as a JSON object.

    It has `prompt` (text, or chat messages as they came) and every other column of the data set.
    """
    content: Any = json.loads(prompt.messages_json) if prompt.messages_json else prompt.text
    return json.dumps({"prompt": content, **json.loads(prompt.columns_json or "{}")})


class ProtoEnum(Protocol):
    """An enum of the contract."""

    def Name(self, number: Any) -> str:
        """The value's name. Raises ValueError where the enum has no such number."""


def body_of(event: Event) -> Message | None:
    """The message that an event carries, for a `match` on its type; None in an event without one."""
    what = event.WhichOneof("what")
    return getattr(event, what) if what else None


def word_of(enum: ProtoEnum, number: int) -> str:
    """The value's name without the enum's prefix, in small letters: `completed` for RUN_END_COMPLETED.

    Raises:
        ValueError: The enum has no such number.
    """
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return enum.Name(number).removeprefix(prefix).lower()


# `end` of a run's summary: how the run ended.
COMPLETED, STOPPED, FAILED = (word_of(RunEnd, end) for end in (RUN_END_COMPLETED, RUN_END_STOPPED, RUN_END_FAILED))
