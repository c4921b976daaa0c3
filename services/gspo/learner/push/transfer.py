"""One push as a call: the header, then the frames once the generator admits it, then its answer.

What it is not: it decides neither who gets what nor what becomes of a failure (publisher.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc

from gspo.common.network.grpc_server import ADMITTED
from gspo.learner.push.weight_frames import WeightFrames
from gspo_proto.generation_pb2 import PushHeader, PushResult, WeightFrame

# A generator admits a push at once, unless it still takes or loads one whose sender has given up.
_ADMIT_TIMEOUT_S = 10.0


class PushFailedError(Exception):
    """A call to a generator failed, as gRPC's status and a reason."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(f"{status.name}: {reason}")
        self.status = status


def push_failure(error: grpc.aio.AioRpcError | PushFailedError) -> PushFailedError:
    """What gRPC raised, in our words."""
    if isinstance(error, PushFailedError):
        return error
    return PushFailedError(error.code(), error.details() or "")


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
    """Write header and frames; how many bytes the frames are. Where the call has ended, its answer says why."""
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
