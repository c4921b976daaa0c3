"""The Redis client of every service: patient while Redis restarts or refuses writes, and always cancellable.

It tries again for REDIS_PATIENCE_S while Redis does not answer. While Redis answers and refuses writes (its disk or
memory is full, its replicas are gone) it waits without an end and reports that. Nothing is lost meanwhile.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import structlog
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MasterDownError, OutOfMemoryError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gspo.common.config.schema import Config
from gspo.common.network.credentials import redis_arguments, redis_refusal

T = TypeVar("T")
# Redis may restart under a run; a client tries again for about this long before its service gives up.
REDIS_PATIENCE_S = 60
# Hundreds of rollouts may end at once, each with a write: they wait for a connection instead of failing.
MAX_CONNECTIONS = 50
# Why Redis refuses writes, by the word that begins its error, and what ends it. A script that meets one has the word in
# its own error, before it has written anything. The client takes it out of some errors, and gives them a class.
_REFUSALS = {
    "MISCONF": "free disk space for its append-only file",
    "OOM": "memory: it has reached maxmemory, and evicts nothing",
    "NOREPLICAS": "replicas: fewer are connected than its min-replicas-to-write",
    "READONLY": "its return as the primary, or the address of the new one: it is a replica",
    "MASTERDOWN": "its primary: it is a replica without one",
}
_CLASSES = {OutOfMemoryError: "OOM", ReadOnlyError: "READONLY", MasterDownError: "MASTERDOWN"}
_AGAIN_S, _LOG_EVERY_S = 0.5, 10.0
log = structlog.get_logger()


class PatientRedis(Redis):
    """Tries a refused command again until Redis accepts it."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        command: Any = super().execute_command
        return await _until_accepted(self.connection_pool, lambda: command(*args, **options))

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _PatientPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _PatientPipeline(Pipeline):
    """A transaction is refused whole. Other pipelines are sent again whole, which every writer here allows."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        stack, scripts = list(self.command_stack), set(self.scripts)
        execute = super().execute

        async def again() -> list[Any]:
            self.command_stack, self.scripts = list(stack), set(scripts)
            return await execute(raise_on_error)

        return await _until_accepted(self.connection_pool, again)


async def _until_accepted(pool: ConnectionPool, send: Callable[[], Awaitable[T]]) -> T:
    logged_at: float | None = None
    while True:
        try:
            reply = await send()
        except ResponseError as error:
            if (refusal := _refusal(error)) is None:
                raise
            if logged_at is None or time.monotonic() - logged_at > _LOG_EVERY_S:
                logged_at = time.monotonic()
                log.error("redis_refuses_writes", reason=str(error), waits_for=_REFUSALS[refusal])
            # After a failover its name may lead to the new primary: the next try asks for its address anew.
            await pool.disconnect(inuse_connections=False)
            await asyncio.sleep(_AGAIN_S)
            continue
        if logged_at is not None:
            log.warning("redis_writes_again")
        return reply


def _refusal(error: ResponseError) -> str | None:
    """The word of _REFUSALS; None for another error."""
    words = re.findall(r"\b[A-Z]{3,}\b", str(error))
    return _CLASSES.get(type(error)) or next((word for word in words if word in _REFUSALS), None)


class _Patience(Retry):
    """Tries again while Redis restarts, but not if Redis refuses our credentials."""

    async def call_with_retry(
        self, do: Any, fail: Any, is_retryable: Any = None, with_failure_count: bool = False
    ) -> Any:
        may_pass = is_retryable or (lambda error: redis_refusal(error) is None)
        return await super().call_with_retry(do, fail, may_pass, with_failure_count)


class _BrokenOff:
    """Counts the connections of a client that were closed, each perhaps before the reply of a command."""

    num = 0


class _Connection(AbstractConnection):
    """Raises the cancellation that sending has forgotten, and counts the connections that were closed.

    The client sends with `asyncio.wait_for`. In Python 3.11 that forgets a cancellation that arrives just after the
    bytes are sent (python/cpython#86296), and the cancelled task never ends.
    """

    broken_off: _BrokenOff

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        before = _num_cancellations()
        await super().send_packed_command(command, check_health)
        if _num_cancellations() > before:
            # The unread reply must not be taken for the next command's.
            await self.disconnect(nowait=True)
            raise asyncio.CancelledError

    async def disconnect(self, *args: Any, **options: Any) -> None:
        """As AbstractConnection.disconnect, which follows each timeout, error and cancellation."""
        self.broken_off.num += 1
        await super().disconnect(*args, **options)


def _num_cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def connect_redis(url: str, config: Config | None = None) -> Redis:
    """A client with binary replies that tries again while Redis restarts, REDIS_PATIENCE_S long.

    While Redis answers and refuses writes (_REFUSALS), it waits without an end.

    Args:
        config: Names its password and certificates; None if it needs none.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        **(redis_arguments(url, config) if config else {}),
        max_connections=MAX_CONNECTIONS,
        timeout=REDIS_PATIENCE_S,
        protocol=2,
        socket_connect_timeout=5,
        socket_timeout=30,
        health_check_interval=15,
        retry=_Patience(ExponentialBackoff(cap=2, base=0.05), retries=REDIS_PATIENCE_S // 2),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
    )
    # The same kind of connection (plain, TLS, Unix socket), with callers that can be cancelled.
    kind = pool.connection_class
    pool.connection_class = type(f"Patient{kind.__name__}", (_Connection, kind), {"broken_off": _BrokenOff()})
    client: Redis = PatientRedis.from_pool(pool)
    return client


def num_broken_off(redis: Redis) -> int:
    """Connections of a client of `connect_redis` that were closed; while it stays equal, no reply was lost."""
    kind: Any = redis.connection_pool.connection_class
    return int(kind.broken_off.num) if issubclass(kind, _Connection) else 0
