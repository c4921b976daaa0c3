"""Resets and steps of environments, asked of whichever reward replica lives.

A step is pure, so one that was asked of a replica which died is asked of another, at no harm. It renders nothing.
waits for: a reward replica, an answer. unblocked by: heartbeats, the reward service.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from redis.asyncio import Redis

from gspo.common.config.services import TlsConfig
from gspo.common.network.grpc_server import open_channel, token_metadata
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import HEARTBEAT_S, Keys
from gspo.common.telemetry import metrics
from gspo.common.telemetry.activity import Activity
from gspo_proto.reward_pb2 import EnvironmentFailure, EnvironmentReply, ResetRequest, StepRequest
from gspo_proto.reward_pb2_grpc import RewardStub

# Longest that a step is tried on one replica after another; a reward service that was killed is back in seconds.
REACH_TIMEOUT_S = 60.0
# Steps wait for a free process in the sandbox; what the environment itself takes is bounded there.
_QUEUE_S = 30.0
_PAUSE_S = 0.2
# Another replica would say the same.
_FINAL = {
    grpc.StatusCode.NOT_FOUND: "unknown_function",
    grpc.StatusCode.FAILED_PRECONDITION: "unknown_function",
    grpc.StatusCode.INVALID_ARGUMENT: "exception",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "output_too_large",
    grpc.StatusCode.UNAUTHENTICATED: "forbidden",
}
Call = Callable[[RewardStub, float], Any]
log = structlog.get_logger()


@dataclass(eq=False)
class _RewardReplica:
    instance: Instance
    channel: grpc.aio.Channel
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    num_calls: int = 0


class EnvironmentClient:
    """Asks the reward replicas of a run.

    Args:
        token: The token that the services share; empty where there is none.
        reach_timeout_s: Longest that a call is tried on one replica after another.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        token: str,
        activity: Activity,
        *,
        tls: TlsConfig | None = None,
        reach_timeout_s: float = REACH_TIMEOUT_S,
    ) -> None:
        self._tls = tls
        self._redis, self._keys, self._activity = redis, keys, activity
        self._metadata, self._reach_timeout_s = token_metadata(token), reach_timeout_s
        self._replicas: dict[str, _RewardReplica] = {}
        self._num_waiting = 0

    async def run(self) -> None:
        """Follow who lives, until cancelled; then close."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            for replica in self._replicas.values():
                replica.gone.set()
                await replica.channel.close()

    async def look(self) -> None:
        """See who lives now; calls to the others are asked anew elsewhere."""
        alive = {instance.uid: instance for instance in await list_instances(self._redis, self._keys, "reward")}
        for uid in [uid for uid in self._replicas if uid not in alive]:
            replica = self._replicas.pop(uid)
            replica.gone.set()
            await replica.channel.close()
        for uid, instance in alive.items():
            if uid not in self._replicas and instance.grpc:  # else it is starting
                self._replicas[uid] = _RewardReplica(instance, open_channel(instance.grpc, self._tls))

    async def reset(self, request: ResetRequest, timeout_s: float) -> EnvironmentReply:
        """The beginning of an episode. Whatever goes wrong is the reply's failure; `timeout_s` is the step's own."""
        return await self._ask(
            "reset", timeout_s, lambda stub, limit: self._call(stub.ResetEnvironment, request, limit)
        )

    async def step(self, request: StepRequest, timeout_s: float) -> EnvironmentReply:
        """What a turn leads to; as `reset`."""
        return await self._ask("step", timeout_s, lambda stub, most: self._call(stub.StepEnvironment, request, most))

    def _call(self, method: Any, request: Any, limit_s: float) -> Any:
        return method(request, timeout=limit_s, metadata=self._metadata)

    async def _ask(self, what: str, timeout_s: float, call: Call) -> EnvironmentReply:
        now = asyncio.get_running_loop().time
        deadline, last = now() + self._reach_timeout_s + timeout_s, "none is registered"
        with metrics.ENVIRONMENT_SECONDS.labels(what).time():
            while now() < deadline:
                replica = await self._choose(deadline)
                if replica is None:
                    break
                try:
                    return await self._ask_one(replica, call, timeout_s + _QUEUE_S)
                except grpc.aio.AioRpcError as error:
                    said = f"{error.code().name}: {error.details()}"
                    if error.code() in _FINAL:
                        return _failed(_FINAL[error.code()], error.details() or said)
                    last = f"{replica.instance.name} said {said}"
                except _ReplicaGoneError:
                    last = f"{replica.instance.name} ended"
                metrics.ENVIRONMENT_RETRIES.inc()
                await asyncio.sleep(_PAUSE_S)
        return _failed("unreachable", f"no reward service answered a {what} in {self._reach_timeout_s:g} s: {last}")

    async def _ask_one(self, replica: _RewardReplica, call: Call, limit_s: float) -> EnvironmentReply:
        """One replica's answer, given up as soon as it is known to be gone.

        Raises:
            AioRpcError: It gave none.
            _ReplicaGoneError: It lost its heartbeat.
        """
        asked = asyncio.ensure_future(_reply(call(RewardStub(replica.channel), limit_s)))
        gone = asyncio.ensure_future(replica.gone.wait())
        replica.num_calls += 1
        try:
            await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done() or asked.cancelled():  # its channel was closed
                raise _ReplicaGoneError
            return asked.result()
        finally:
            replica.num_calls -= 1
            for task in (asked, gone):
                task.cancel()
            await asyncio.gather(asked, gone, return_exceptions=True)

    async def _choose(self, deadline: float) -> _RewardReplica | None:
        """The living replica with the fewest calls under way; None where none comes before the deadline."""
        if not self._replicas:
            await self.look()
        if not self._replicas:
            async with self._waiting():
                while not self._replicas and asyncio.get_running_loop().time() < deadline:
                    await asyncio.sleep(_PAUSE_S)
                    await self.look()
        fewest = min((replica.num_calls for replica in self._replicas.values()), default=0)
        least = [replica for replica in self._replicas.values() if replica.num_calls == fewest]
        return random.choice(least) if least else None  # noqa: S311 - spreads load

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        """Many episodes may wait at a time: the service says so once."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._activity.set("waiting", "reward", "no replica answers environment steps")
            log.warning("no_reward_service", detail="episodes wait for one")
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self._activity.set("busy", "generating")


class _ReplicaGoneError(Exception):
    pass


async def _reply(call: Any) -> EnvironmentReply:
    reply: EnvironmentReply = await call
    return reply


def _failed(kind: str, text: str) -> EnvironmentReply:
    return EnvironmentReply(failure=EnvironmentFailure(kind=kind, text=text))
