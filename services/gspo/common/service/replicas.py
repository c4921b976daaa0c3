"""The replicas of another service that can be called now: their channels, the calls in flight, and who is next.

waits for: a replica. unblocked by: heartbeats. A call to a replica that loses its heartbeat ends at once.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import structlog

from gspo.common.network.grpc_server import open_channel
from gspo.common.service.app import Service
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import HEARTBEAT_S

_PAUSE_S = 0.2
log = structlog.get_logger()
T = TypeVar("T")


class ReplicaLostError(Exception):
    """The replica lost its heartbeat before it answered."""


@dataclass(eq=False)
class ServiceReplica:
    """One process of the service.

    Attributes:
        num_calls: Calls of this process in flight there.
        avoided_until_s: Others are called before, by time.monotonic.
    """

    instance: Instance
    channel: grpc.aio.Channel
    num_calls: int = 0
    avoided_until_s: float = 0.0
    _lost: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A block with one call."""
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    async def while_alive(self, answer: Awaitable[T]) -> T:
        """The result of a call to the replica.

        Raises:
            ReplicaLostError: It lost its heartbeat before.
        """
        answering, losing = asyncio.ensure_future(answer), asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait([answering, losing], return_when=asyncio.FIRST_COMPLETED)
            # The end of its channel cancels the call too.
            if self._lost.is_set() and (not answering.done() or answering.cancelled()):
                raise ReplicaLostError(f"{self.instance.name} lost its heartbeat")
            return answering.result()
        finally:
            answering.cancel()
            losing.cancel()

    async def close(self) -> None:
        """End its calls and its channel."""
        self._lost.set()
        await self.channel.close()


class Replicas:
    """The replicas of one service of the run.

    Args:
        of: The service.
        lack: What a wait for one means, for the service's activity.
    """

    def __init__(self, service: Service, of: str, lack: str) -> None:
        self._service, self._of, self._lack = service, of, lack
        self._alive: dict[str, ServiceReplica] = {}
        self._num_waiting, self._shown = 0, ExitStack()

    async def run(self) -> None:
        """Follow the heartbeats until cancelled; then close."""
        try:
            while True:
                await self.refresh()
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            for replica in self._alive.values():
                await replica.close()

    async def refresh(self) -> None:
        """Read which replicas are alive now; calls to the others end."""
        service = self._service
        alive = {instance.uid: instance for instance in await list_instances(service.redis, service.keys, self._of)}
        for uid in [uid for uid in self._alive if uid not in alive]:
            await self._alive.pop(uid).close()
        for uid, instance in alive.items():
            if uid not in self._alive and instance.grpc:  # else it is starting
                self._alive[uid] = ServiceReplica(instance, open_channel(instance.grpc, service.config.services.tls))

    async def choose(self, deadline_s: float, preferred: str | None = None) -> ServiceReplica | None:
        """The preferred replica, or the one with the fewest calls in flight.

        Args:
            deadline_s: By time.monotonic.
            preferred: Its uid.

        Returns:
            None where none registers before the deadline.
        """
        if not self._alive:
            await self.refresh()
        if not self._alive:
            with self._waiting():
                while not self._alive and time.monotonic() < deadline_s:
                    await asyncio.sleep(_PAUSE_S)
                    await self.refresh()
        now, alive = time.monotonic(), self._alive
        welcome = {uid: replica for uid, replica in alive.items() if replica.avoided_until_s <= now} or alive
        if preferred in welcome:
            return welcome[preferred]
        fewest = min((replica.num_calls for replica in welcome.values()), default=0)
        idlest = [replica for replica in welcome.values() if replica.num_calls == fewest]
        return random.choice(idlest) if idlest else None  # noqa: S311 - spreads load

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Show the wait in the service's activity, once for all callers that wait at a time."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._shown.enter_context(self._service.activity.waiting(self._of, self._lack))
            log.warning("no_replica", service_needed=self._of, detail=f"{self._lack}; calls wait for one")
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self._shown.close()
