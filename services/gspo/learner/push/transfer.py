"""One push as a call, and the queue of pushes: which are sent now, and how long each may take.

All pushes share the learner's one sender. Many at a time would each take many times as long, and none would meet its
deadline. So a few are sent at a time, in the order in which they asked. A generator that has every byte stages and
loads it while the next one is sent to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import grpc

from gspo.common.network.grpc_server import ADMITTED
from gspo.common.weights.time_limit import TimeLimit
from gspo.learner.push.weight_frames import WeightFrames
from gspo_proto.generation_pb2 import PushHeader, PushResult, WeightFrame

Kind = Literal["full", "delta"]
# One whole policy at a time uses all of the sender. Changes are small: several at a time hide the round trips. Each
# kind has its own slots, so that changes never wait behind whole policies.
_NUM_SLOTS = {"full": 1, "delta": 4}
# Of the whole policy, transfer, digest and load together: a quarter of this (the margin) is a network of 200 Mbit/s.
_FIRST_BYTES_S = 1e8
# A generator whose pushes failed gets twice the time with each failure, so many times: its own network may be slower.
_MOST_DOUBLINGS = 3
# A generator admits a push at once, unless it still takes or loads one whose sender has given up.
_ADMIT_TIMEOUT_S = 10.0


class PushFailedError(Exception):
    """A call to a generator failed, as gRPC's status and a reason."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(f"{status.name}: {reason}")
        self.status = status


class SendQueue:
    """Slots and time limits of pushes.

    Attributes:
        waiting: The uids of the generators whose pushes wait for a slot.

    Args:
        least_s: Least time limit of a push.
    """

    def __init__(self, least_s: float) -> None:
        self._slots = {kind: asyncio.Semaphore(num) for kind, num in _NUM_SLOTS.items()}
        self._limits = {kind: TimeLimit(least_s, _FIRST_BYTES_S) for kind in _NUM_SLOTS}
        self.waiting: set[str] = set()

    @asynccontextmanager
    async def send_slot(self, kind: Kind, uid: str) -> AsyncIterator[Callable[[], None]]:
        """Wait for a slot to send to a generator, first come first served.

        The slot is free again at the end of the block, or at a call of the yielded function before it.
        """
        slots = self._slots[kind]
        if slots.locked():
            self.waiting.add(uid)
        try:
            await slots.acquire()
        finally:
            self.waiting.discard(uid)
        with contextlib.ExitStack() as slot:
            slot.callback(slots.release)
            yield slot.close

    def limit_s(self, kind: Kind, num_bytes: int, num_failures: int = 0) -> float:
        """Seconds that a push may take, from its header to the answer.

        Args:
            num_bytes: Of the whole policy: changes are packed from it, and it is staged, digested and loaded.
            num_failures: Pushes in a row that failed at this generator.
        """
        return self._limits[kind].seconds(num_bytes) * 2.0 ** min(num_failures, _MOST_DOUBLINGS)

    def record(self, kind: Kind, num_bytes: int, seconds: float) -> None:
        """Note how long a push took that succeeded."""
        self._limits[kind].record(num_bytes, seconds)


async def send_push(
    call: Any, header: PushHeader, frames: WeightFrames, on_sent: Callable[[], None] = lambda: None
) -> tuple[PushResult, int]:
    """Send one version over a PushWeights call; the generator's answer, and the bytes of the frames.

    Args:
        on_sent: Called when nothing more is sent, whether the push failed or the generator now stages and loads.

    Raises:
        grpc.aio.AioRpcError: The generator refused it, or the call broke.
        PushFailedError: The generator did not admit it in time, or answered that it serves something else.
    """
    try:
        try:
            num_bytes = await _transmit(call, header, frames)
        finally:
            on_sent()
        result = await call
    finally:
        call.cancel()
    if (result.version, result.digest) != (header.version, header.digest):
        raise PushFailedError(
            grpc.StatusCode.DATA_LOSS,
            f"version {header.version} with digest {header.digest[:12]} was sent, and the generator answers that it "
            f"serves version {result.version} with digest {result.digest[:12]}",
        )
    return result, num_bytes


async def _transmit(call: Any, header: PushHeader, frames: WeightFrames) -> int:
    """Write header and frames; how many bytes the frames are. If the call has ended, its answer has the reason."""
    num_bytes = 0
    with contextlib.suppress(asyncio.InvalidStateError):
        if await _is_admitted(call, header):
            async for frame in frames:
                num_bytes += frame.ByteSize()
                await call.write(frame)
            await call.done_writing()
    return num_bytes


async def _is_admitted(call: Any, header: PushHeader) -> bool:
    """Send the header alone: a refusal that met frames on their way would be lost to "Internal error"."""
    try:
        async with asyncio.timeout(_ADMIT_TIMEOUT_S):
            await call.write(WeightFrame(header=header))
            # They come with a refusal too.
            return ADMITTED in tuple(await call.initial_metadata())
    except TimeoutError as error:
        raise PushFailedError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the generator did not admit the push within {_ADMIT_TIMEOUT_S:g} s: it does not answer, or still takes "
            "or loads another one",
        ) from error
