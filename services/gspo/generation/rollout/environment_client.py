"""Calls resets and steps of environments on the reward replicas of a run.

A step is pure: where a replica ends before it answers, the client calls another one.
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

from gspo.common.network.grpc_server import open_channel, token_metadata
from gspo.common.service.app import Service
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import HEARTBEAT_S, REWARD
from gspo.common.telemetry import metrics
from gspo_proto.reward_pb2 import EnvironmentFailure, EnvironmentReply, ResetRequest, StepRequest
from gspo_proto.reward_pb2_grpc import RewardStub

# Longest time of trying one replica after another; a reward service that was killed is back in seconds.
REACH_TIMEOUT_S = 60.0
# A step may wait so long for a free process in the sandbox, which bounds the environment's own time.
_QUEUE_S = 30.0
_PAUSE_S = 0.2
# Any other replica would answer the same.
_FINAL = {
    grpc.StatusCode.NOT_FOUND: "unknown_function",
    grpc.StatusCode.FAILED_PRECONDITION: "unknown_function",
    grpc.StatusCode.INVALID_ARGUMENT: "exception",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "output_too_large",
    grpc.StatusCode.UNAUTHENTICATED: "forbidden",
}
Method = Callable[[RewardStub], Any]
log = structlog.get_logger()


@dataclass(eq=False)
class _RewardReplica:
    instance: Instance
    channel: grpc.aio.Channel
    calls: set[asyncio.Timeout] = field(default_factory=set)  # ended when the replica is gone

    async def close(self) -> None:
        """End its calls, which are repeated elsewhere, and its channel."""
        for call in self.calls:
            if not call.expired():
                call.reschedule(asyncio.get_running_loop().time())
        await self.channel.close()


class EnvironmentClient:
    """Calls environments on the reward replicas of a run."""

    def __init__(self, service: Service) -> None:
        self._service, self._metadata = service, token_metadata(service.options.token)
        self._replicas: dict[str, _RewardReplica] = {}
        self._num_waiting = 0

    async def run(self) -> None:
        """Follow the replicas' heartbeats until cancelled; then close."""
        try:
            while True:
                await self.refresh()
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            for replica in self._replicas.values():
                await replica.close()

    async def refresh(self) -> None:
        """Read which replicas are alive now; calls to the others are repeated elsewhere."""
        service = self._service
        alive = {instance.uid: instance for instance in await list_instances(service.redis, service.keys, REWARD)}
        for uid in [uid for uid in self._replicas if uid not in alive]:
            await self._replicas.pop(uid).close()
        for uid, instance in alive.items():
            if uid not in self._replicas and instance.grpc:  # else it is starting
                self._replicas[uid] = _RewardReplica(instance, open_channel(instance.grpc, service.config.services.tls))

    async def reset(self, request: ResetRequest, timeout_s: float) -> EnvironmentReply:
        """The beginning of an episode.

        Args:
            timeout_s: Time of the environment's own work.

        Returns:
            The reply. Every failure is the reply's `failure`, also where no replica can be reached.
        """
        return await self._ask("reset", timeout_s, lambda stub: stub.ResetEnvironment, request)

    async def step(self, request: StepRequest, timeout_s: float) -> EnvironmentReply:
        """The environment's answer to a turn; arguments and failures as in `reset`."""
        return await self._ask("step", timeout_s, lambda stub: stub.StepEnvironment, request)

    async def _ask(self, what: str, timeout_s: float, method: Method, request: Any) -> EnvironmentReply:
        now = asyncio.get_running_loop().time
        deadline, last = now() + REACH_TIMEOUT_S + timeout_s, "none is registered"
        with metrics.ENVIRONMENT_SECONDS.labels(what).time():
            while now() < deadline:
                replica = await self._choose(deadline)
                if replica is None:
                    break
                try:
                    return await self._ask_one(replica, method, request, timeout_s + _QUEUE_S)
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details()}"
                    if error.code() in _FINAL:
                        return _failed(_FINAL[error.code()], error.details() or reason)
                    last = f"{replica.instance.name} said {reason}"
                except TimeoutError:
                    last = f"{replica.instance.name} ended"
                metrics.ENVIRONMENT_RETRIES.inc()
                await asyncio.sleep(_PAUSE_S)
        return _failed("unreachable", f"no reward service answered a {what} in {REACH_TIMEOUT_S:g} s: {last}")

    async def _ask_one(self, replica: _RewardReplica, method: Method, request: Any, limit_s: float) -> EnvironmentReply:
        """One replica's answer.

        Raises:
            AioRpcError: It gave none.
            TimeoutError: It lost its heartbeat.
        """
        async with asyncio.timeout(None) as call:
            replica.calls.add(call)
            try:
                stub = RewardStub(replica.channel)
                reply: EnvironmentReply = await method(stub)(request, timeout=limit_s, metadata=self._metadata)
                return reply
            finally:
                replica.calls.discard(call)

    async def _choose(self, deadline: float) -> _RewardReplica | None:
        """The replica with the fewest calls in flight; None where none registers before the deadline."""
        if not self._replicas:
            await self.refresh()
        if not self._replicas:
            async with self._waiting():
                while not self._replicas and asyncio.get_running_loop().time() < deadline:
                    await asyncio.sleep(_PAUSE_S)
                    await self.refresh()
        fewest = min((len(replica.calls) for replica in self._replicas.values()), default=0)
        idlest = [replica for replica in self._replicas.values() if len(replica.calls) == fewest]
        return random.choice(idlest) if idlest else None  # noqa: S311 - spreads load

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        """Show the wait in the service's activity, once for all episodes that wait at a time."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._service.activity.set("waiting", "reward", "no replica answers environment steps")
            log.warning("no_reward_service", detail="episodes wait for one")
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self._service.activity.set("busy", "generating")


def _failed(kind: str, text: str) -> EnvironmentReply:
    return EnvironmentReply(failure=EnvironmentFailure(kind=kind, text=text))
