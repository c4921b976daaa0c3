"""One generator as the learner knows it: the version that it serves, its failures, and the calls to it.

It decides no push; the publisher does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from gspo.common.streams.instances import Instance
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.transfer import PushFailedError, send_push
from gspo.learner.push.weight_frames import WeightFrames
from gspo_proto.generation_pb2 import DescribeRequest, GeneratorDescription, PushHeader, PushResult
from gspo_proto.generation_pb2_grpc import GenerationStub

State = Literal["current", "behind", "out"]
REPLICA_STATES: tuple[State, ...] = ("current", "behind", "out")
# One failure is an accident of the network; three in a row are a bad engine, which then costs one attempt in 30 s.
_OUT_AFTER = 3
_DESCRIBE_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


@dataclass
class GeneratorReplica:
    """A generator process.

    Attributes:
        version: The version that it serves.
        digest: Of this version; empty where it is not known.
        metadata: Of every call to it.
        pushing: The push in flight.
        problem: Why the last push failed.
        num_failures: Pushes that failed since the last that succeeded.
        not_before_s: When the next push may begin, by time.monotonic.
        behind_since_unix_s: When it was first seen without the newest version; None while it has it.
    """

    instance: Instance
    channel: grpc.aio.Channel
    version: int
    digest: str
    metadata: tuple[tuple[str, str], ...] = ()
    pushing: asyncio.Task[None] | None = None
    problem: str = ""
    num_failures: int = 0
    not_before_s: float = 0.0
    behind_since_unix_s: float | None = None

    @property
    def name(self) -> str:
        """Its name in the run and its address: replicas may share a name."""
        return f"{self.instance.name} ({self.instance.grpc})"

    def serves(self, policy: PolicyWeights) -> bool:
        """Whether it serves this version."""
        return (self.version, self.digest) == (policy.version, policy.digest)

    @property
    def state(self) -> State:
        """`out` after too many failures, until it has caught up."""
        if self.num_failures >= _OUT_AFTER:
            return "out"
        return "current" if self.behind_since_unix_s is None else "behind"

    @property
    def idle(self) -> bool:
        """Whether no push to it is in flight and the next one is due."""
        return self.pushing is None and time.monotonic() >= self.not_before_s

    async def refresh(self) -> GeneratorDescription:
        """Ask the generator for the version that it serves.

        Raises:
            PushFailedError: It does not answer; its version is then unknown.
        """
        self.digest = ""
        with _push_failures():
            description: GeneratorDescription = await GenerationStub(self.channel).Describe(
                DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S, metadata=self.metadata
            )
        self.version, self.digest = description.version, description.digest
        return description

    async def push(
        self, header: PushHeader, frames: WeightFrames, *, limit_s: float, on_sent: Callable[[], None]
    ) -> tuple[PushResult, int]:
        """Send a version within `limit_s`; the generator's answer, and the bytes of the frames.

        Args:
            on_sent: Called when nothing more is sent, whether the push failed or the generator now stages and loads.

        Raises:
            PushFailedError: The generator refused the version, or does not serve it in time.
        """
        with _push_failures():
            call = GenerationStub(self.channel).PushWeights(timeout=limit_s, metadata=self.metadata)
            result, num_bytes = await send_push(call, header, frames, on_sent)
        self.version, self.digest = result.version, result.digest
        return result, num_bytes

    def fall_behind(self) -> None:
        """There is a newer version than it serves."""
        self.behind_since_unix_s = self.behind_since_unix_s or time.time()

    def catch_up(self) -> bool:
        """It serves the newest version; whether it was out until now."""
        was_out = self.state == "out"
        self.problem, self.num_failures, self.not_before_s, self.behind_since_unix_s = "", 0, 0.0, None
        return was_out

    def fail(self, problem: str) -> bool:
        """A push failed: the next waits, the longer the more have failed; whether this one put it out."""
        was_out = self.state == "out"
        self.problem = problem
        self.num_failures += 1
        self.not_before_s = time.monotonic() + min(_FIRST_PAUSE_S * 2.0 ** (self.num_failures - 1), _LONGEST_PAUSE_S)
        return self.state == "out" and not was_out

    def describe(self, *, waiting: bool) -> dict[str, Any]:
        """For the learner's heartbeat; `waiting` is whether its push waits for others to be sent."""
        return {
            "name": self.name,
            "state": self.state,
            "version": self.version,
            "num_failures": self.num_failures,
            "problem": self.problem,
            "since_unix_s": self.behind_since_unix_s,
            "waiting": waiting,
        }

    async def close(self) -> None:
        """End the push in flight and the channel."""
        if self.pushing:
            self.pushing.cancel()
        await self.channel.close(None)


@contextmanager
def _push_failures() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise PushFailedError(error.code(), error.details() or "") from error
