"""A client that waits while Redis answers and refuses to write: its disk is full, or its memory.

It waits for as long as that lasts, and says so: nothing is lost by it, and only the user can make room. A Redis that
does not answer at all is another case, with an end: runtime.py's retries. Neighbour: runtime.py makes the clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import OutOfMemoryError, ResponseError

T = TypeVar("T")
# MISCONF: the append-only file or the snapshot cannot be written. OOM: maxmemory is reached, and nothing is evicted.
# A script that meets either says so within its own error, before it has written anything.
_REFUSALS = ("MISCONF", "OOM command not allowed")
_AGAIN_S, _SAY_EVERY_S = 0.5, 10.0
log = structlog.get_logger()


class PatientRedis(Redis):
    """Tries a refused command again until Redis takes it."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """As Redis.execute_command."""
        command: Any = super().execute_command
        return await _until_taken(lambda: command(*args, **options))

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """As Redis.pipeline."""
        return _PatientPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _PatientPipeline(Pipeline):
    """A transaction is refused whole. Without one, what was taken is sent again: every writer here allows that."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        stack, scripts = list(self.command_stack), set(self.scripts)
        execute = super().execute

        async def again() -> list[Any]:
            self.command_stack, self.scripts = list(stack), set(scripts)
            return await execute(raise_on_error)

        return await _until_taken(again)


def _is_refusal(error: ResponseError) -> bool:
    # The client knows one of the two by a class, and takes the word out of its message.
    return isinstance(error, OutOfMemoryError) or any(refusal in str(error) for refusal in _REFUSALS)


async def _until_taken(send: Callable[[], Awaitable[T]]) -> T:
    said_at: float | None = None
    while True:
        try:
            taken = await send()
        except ResponseError as error:
            if not _is_refusal(error):
                raise
            if said_at is None or time.monotonic() - said_at > _SAY_EVERY_S:
                said_at = time.monotonic()
                log.error("redis_refuses_writes", reason=str(error), waits_for="room on its disk or in its memory")
            await asyncio.sleep(_AGAIN_S)
            continue
        if said_at is not None:
            log.warning("redis_writes_again")
        return taken
