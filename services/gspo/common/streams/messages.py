"""Reading the contract's messages: the one inside an event, and the word of an enum's value."""

from __future__ import annotations

from typing import Any, Protocol

from google.protobuf.message import Message

from gspo_proto.rollout_pb2 import Event


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
