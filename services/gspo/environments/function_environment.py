"""Environments that are functions: their resets and steps are calls of a run's reward replicas.

A step is pure: where a replica ends before it answers, the client calls another one.
waits for: a reward replica, an answer. unblocked by: heartbeats, the reward service.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from gspo.common.network.grpc_server import token_metadata
from gspo.common.service.app import Service
from gspo.common.service.replicas import ReplicaLostError, Replicas
from gspo.common.streams.keys import REWARD
from gspo.common.telemetry import metrics
from gspo.environments.environment import Environment, failed
from gspo_proto.reward_pb2 import EnvironmentReply, ResetRequest, StepRequest
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


class FunctionEnvironment(Environment):
    """Calls environments on the reward replicas of a run."""

    def __init__(self, service: Service) -> None:
        self._metadata = token_metadata(service.options.token)
        self._replicas = Replicas(service, REWARD, "no replica answers environment steps")

    async def run(self) -> None:
        """Follow the replicas' heartbeats until cancelled; then close."""
        await self._replicas.run()

    async def begin(self, request: ResetRequest, timeout_s: float) -> EnvironmentReply:
        """As in Environment; it also fails if no replica can be reached."""
        return await self._ask("reset", timeout_s, lambda stub: stub.ResetEnvironment, request)

    async def step(self, request: StepRequest, timeout_s: float, task_json: str = "") -> EnvironmentReply:  # noqa: ARG002
        """As in `begin`. The state is in the request."""
        return await self._ask("step", timeout_s, lambda stub: stub.StepEnvironment, request)

    async def _ask(self, what: str, timeout_s: float, method: Method, request: Any) -> EnvironmentReply:
        deadline_s, last = time.monotonic() + REACH_TIMEOUT_S + timeout_s, "none is registered"
        with metrics.ENVIRONMENT_SECONDS.labels(what).time():
            while time.monotonic() < deadline_s:
                replica = await self._replicas.choose(deadline_s)
                if replica is None:
                    break
                try:
                    ask, limit_s = method(RewardStub(replica.channel)), timeout_s + _QUEUE_S
                    with replica.counted():
                        reply: EnvironmentReply = await replica.while_alive(
                            ask(request, timeout=limit_s, metadata=self._metadata)
                        )
                    return reply
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details()}"
                    if error.code() in _FINAL:
                        return failed(_FINAL[error.code()], error.details() or reason)
                    last = f"{replica.instance.name} said {reason}"
                except ReplicaLostError as error:
                    last = str(error)
                metrics.ENVIRONMENT_RETRIES.inc()
                await asyncio.sleep(_PAUSE_S)
        return failed("unreachable", f"no reward service answered a {what} in {REACH_TIMEOUT_S:g} s: {last}")
