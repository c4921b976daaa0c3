"""One generator as the learner knows it: the version that it serves, its failures, and the calls to it.

It decides no push; the publisher does. generation/servicer.py answers the calls.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import grpc

from gspo.common.network.grpc_server import ADMITTED
from gspo.common.streams.instances import Instance
from gspo.learner.push.policy_weights import PolicyFacts
from gspo_proto.generation_pb2 import (
    DESCRIPTOR,
    DescribeRequest,
    GeneratorDescription,
    PushHeader,
    PushResult,
    WeightFrame,
)
from gspo_proto.generation_pb2_grpc import GenerationStub

State = Literal["current", "behind", "out"]
REPLICA_STATES: tuple[State, ...] = ("current", "behind", "out")
# One failure is an accident of the network; three in a row are a bad engine, which then costs one attempt in 30 s.
_OUT_AFTER = 3
_DESCRIBE_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# A generator admits a push at once, unless it still takes or loads one whose sender has given up.
_ADMIT_TIMEOUT_S = 10.0


class PushFailedError(Exception):
    """A call to a generator failed, as gRPC's status and a reason."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(f"{status.name}: {reason}")
        self.status = status


class GeneratorReplica:
    """A generator process.

    Attributes:
        version: The version that it serves.
        digest: This version's; empty where it is not known.
        pushing: The push in flight.
        problem: Why the last push failed.
        num_failures: Pushes that failed since the last that succeeded.
        refuses: Whether it has refused this learner's policy as that of another model.
        must_reload: Whether its engine may have other weights than its version's.
        not_before_s: When the next push may begin, by time.monotonic.
        behind_since_unix_s: When it was first seen without the newest version; None while it has it.

    Args:
        metadata: That of every call to it.
    """

    def __init__(self, instance: Instance, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self.instance, self._channel, self._metadata = instance, channel, metadata
        self.version, self.digest = int(instance.facts["version"]), str(instance.facts["digest"])
        self.pushing: asyncio.Task[None] | None = None
        self.problem, self.num_failures, self.not_before_s, self.refuses = "", 0, 0.0, False
        self.must_reload = False
        self.behind_since_unix_s: float | None = None
        self._limit: asyncio.Timeout | None = None

    @property
    def name(self) -> str:
        """Its name in the run and its address: replicas may share a name."""
        return f"{self.instance.name} ({self.instance.grpc})"

    def serves(self, target: PolicyFacts) -> bool:
        """Whether it serves this version."""
        return (self.version, self.digest) == (target.version, target.digest)

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
            description: GeneratorDescription = await GenerationStub(self._channel).Describe(
                DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S, metadata=self._metadata
            )
        self.version, self.digest = description.version, description.digest
        return description

    async def push(
        self, header: PushHeader, frames: AsyncIterator[bytes], *, limit_s: float, on_sent: Callable[[], None]
    ) -> tuple[PushResult, int]:
        """Send a version within `limit_s`; the generator's answer, and the bytes of the frames.

        Args:
            frames: Each as the bytes of a WeightFrame, which are written once for all generators.
            on_sent: Called when nothing more is sent, whether the push failed or the generator now stages and loads.
                Other ranks are about done then, since their shares have about as many bytes.

        Raises:
            PushFailedError: The generator refused the version, or does not serve it in time.
        """
        with _push_failures():
            call = push_weights(self._channel)(timeout=limit_s, metadata=self._metadata)
            try:
                async with asyncio.timeout(None) as self._limit:
                    try:
                        num_bytes = await _transmit(call, header, frames)
                    finally:
                        on_sent()
                    result: PushResult = await call
            except TimeoutError as error:
                reason = "given up, since every service waits and nothing moves"
                raise PushFailedError(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from error
            finally:
                self._limit = None
                call.cancel()
        if (result.version, result.digest) != (header.version, header.digest):
            raise PushFailedError(
                grpc.StatusCode.DATA_LOSS,
                f"version {header.version} with digest {header.digest[:12]} was sent, and the generator answers that "
                f"it serves version {result.version} with digest {result.digest[:12]}",
            )
        self.version, self.digest = result.version, result.digest
        return result, num_bytes

    def give_up(self) -> None:
        """End the push in flight as failed, and the pause before the next one."""
        self.not_before_s = 0.0
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def fall_behind(self) -> None:
        """There is a newer version than it serves."""
        self.behind_since_unix_s = self.behind_since_unix_s or time.time()

    def catch_up(self) -> bool:
        """It serves the newest version; whether it was out until now."""
        was_out = self.state == "out"
        self.problem, self.num_failures, self.not_before_s, self.behind_since_unix_s = "", 0, 0.0, None
        self.refuses = False
        return was_out

    def fail(self, problem: str, *, refuses: bool = False) -> bool:
        """A push failed: the next waits, the longer the more have failed; whether this one put it out."""
        was_out = self.state == "out"
        self.problem, self.refuses = problem, refuses
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
        await self._channel.close(None)


class LiveWeights:
    """Compares the weights in the engines, which could differ after a load although the digests are equal.

    It has the checksums of the newest version that has some. Engines on other kinds of GPUs have other kernels, and so
    another form of the same weights.
    """

    def __init__(self) -> None:
        self._version = -1
        self._first: dict[tuple[str, ...], tuple[GeneratorReplica, str]] = {}

    def differing(self, replica: GeneratorReplica, version: int, checksum: str) -> GeneratorReplica | None:
        """A generator whose engine has other weights than this one's; both are to load theirs again."""
        if not checksum:
            return None
        if version != self._version:
            self._version, self._first = version, {}
        kinds = tuple(sorted(replica.instance.facts.get("gpus", {}).values()))
        other, expected = self._first.setdefault(kinds, (replica, checksum))
        if checksum == expected:
            return None
        del self._first[kinds]
        return other


@contextmanager
def _push_failures() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise PushFailedError(error.code(), error.details() or "") from error


def push_weights(channel: grpc.aio.Channel) -> Any:
    """The call PushWeights, with frames as bytes: the generated stub would serialize them for each generator."""
    method = DESCRIPTOR.services_by_name["Generation"].methods_by_name["PushWeights"]
    path = f"/{method.containing_service.full_name}/{method.name}"
    return channel.stream_unary(path, response_deserializer=PushResult.FromString)


async def _transmit(call: Any, header: PushHeader, frames: AsyncIterator[bytes]) -> int:
    """Write header and frames; how many bytes the frames are. If the call has ended, its answer has the reason."""
    num_bytes = 0
    with contextlib.suppress(asyncio.InvalidStateError):
        if await _is_admitted(call, header):
            async for frame in frames:
                num_bytes += len(frame)
                await call.write(frame)
            await call.done_writing()
    return num_bytes


async def _is_admitted(call: Any, header: PushHeader) -> bool:
    """Send the header alone: a refusal that met frames on their way would be lost to "Internal error"."""
    try:
        async with asyncio.timeout(_ADMIT_TIMEOUT_S):
            await call.write(WeightFrame(header=header).SerializeToString())
            # They come with a refusal too.
            return ADMITTED in tuple(await call.initial_metadata())
    except TimeoutError as error:
        raise PushFailedError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the generator did not admit the push within {_ADMIT_TIMEOUT_S:g} s: it does not answer, or still takes "
            "or loads another one",
        ) from error
