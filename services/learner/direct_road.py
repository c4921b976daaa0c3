"""The learner's end of the direct road to one generator: a push's bytes by a link, their description by the call.

What it is not: a push, whose header, fence, digest, deadline and answer stay with the call (publisher.py).
Neighbours: services/common/direct.py is the link, the generation service's direct_road.py the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from gspo_proto.generation_pb2 import PushHeader
from services.common.direct import MEETING, DirectError, Link, Meeting, device_id
from services.learner.frames import Frames

# Where the generator ended the link, its answer says why, and is on its way.
_ANSWER_S = 5.0


class DirectRoad:
    """One generator's road, made at its first push and kept for later ones; made anew after any failure.

    Args:
        transport: "gloo" or "nccl".
        host: The generator's.
        timeout_s: Longest that one transfer may take.
    """

    def __init__(self, transport: str, host: str, timeout_s: float) -> None:
        self._transport, self._host, self._timeout_s = transport, host, timeout_s
        self._link: Link | None = None

    def name(self, header: PushHeader) -> None:
        """Say in a push's header how its bytes come, and by which link where there is one."""
        header.transport, header.device = self._transport, device_id(self._transport)
        header.link = self._link.name if self._link else ""

    async def carry(self, call: Any, told: dict[str, str], frames: Frames) -> int:
        """Send the frames of an admitted push; how many bytes they are.

        Args:
            told: The initial metadata of the call.

        Raises:
            DirectError: The link broke, and the call is still without an answer.
            grpc.aio.AioRpcError: The generator refused the push, or the call broke.
        """
        under_way, num_bytes = True, 0
        # However the call ends, nobody waits on the link any longer.
        call.add_done_callback(lambda _: self.close() if under_way else None)
        try:
            link = await self._met(told)
            async for described, data in frames.apart():
                await call.write(described)
                await link.send(data)
                num_bytes += described.ByteSize() + data.nbytes
        except DirectError:
            await _answered(call)
            raise
        finally:
            under_way = False
        return num_bytes

    async def _met(self, told: dict[str, str]) -> Link:
        if MEETING in told:
            self.close()
            self._link = Link(self._transport, self._timeout_s)
            await self._link.join(self._host, Meeting.parse(told[MEETING]))
        if self._link is None:
            raise DirectError(f"{self._transport}: the generator takes no direct road")
        return self._link

    def close(self) -> None:
        """End the link; the next push makes another."""
        if self._link:
            self._link.close()
            self._link = None


async def _answered(call: Any) -> None:
    """Raise the generator's answer where it comes."""
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.done_writing()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            await call
