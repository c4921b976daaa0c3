"""Connections to Redis whose caller can always be cancelled.

The client sends with `asyncio.wait_for`, which in Python 3.11 forgets a cancellation that arrives as the bytes have
just been sent (python/cpython#86296): a task that was told to end goes on for ever. What it is not: the waiting for a
Redis that refuses writes (patient_redis.py). Neighbour: runtime.py makes the clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from redis.asyncio.connection import AbstractConnection


class _Cancellable(AbstractConnection):
    """Raises the cancellation that sending has forgotten."""

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """As AbstractConnection.send_packed_command."""
        before = _num_cancellations()
        await super().send_packed_command(command, check_health)
        if _num_cancellations() > before:
            # The reply, which nobody reads, must not be taken for the next command's.
            await self.disconnect(nowait=True)
            raise asyncio.CancelledError


def _num_cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def cancellable(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """The same kind of connection (plain, TLS, Unix socket), with callers that can be cancelled."""
    return type(f"Cancellable{kind.__name__}", (_Cancellable, kind), {})
