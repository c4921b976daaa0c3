"""What a message holds: the word of an enum's value."""

from __future__ import annotations

from typing import Any, Protocol


class ProtoEnum(Protocol):
    """An enum of the contract."""

    def Name(self, number: Any) -> str:
        """The value's name. Raises ValueError where the enum has no such number."""


def word_of(enum: ProtoEnum, number: int) -> str:
    """The value's name without the enum's prefix, in small letters: `completed` for RUN_END_COMPLETED.

    Raises:
        ValueError: The enum has no such number.
    """
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return enum.Name(number).removeprefix(prefix).lower()
