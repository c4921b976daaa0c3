"""The generator's end of the direct road from its learner: it listens when a push asks for it, and takes bytes.

It decides nothing: whether a push is admitted, and whether what came is loaded, is receiver.py's. One link at a time,
because one push is taken at a time. Neighbours: services/common/direct.py is the link, the learner's direct_road.py
the other end.
"""

from __future__ import annotations

from gspo_proto.generation_pb2 import PushHeader
from services.common.direct import MEETING, Bytes, DirectError, Link, Meeting, device_id, unavailable


class DirectRoad:
    """The link to the learner that pushes now, or pushed last.

    Args:
        host: The address that this service binds.
        timeout_s: Longest that one transfer may take.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host, self._timeout_s = host, timeout_s
        self._link: Link | None = None
        self._meeting: Meeting | None = None

    def prepare(self, header: PushHeader) -> tuple[tuple[str, str], ...]:
        """What the learner is told of the road that its header asks for: where a new link is made, if one is due.

        Raises:
            DirectError: There can be no such road here.
        """
        if header.transport in ("", "grpc"):
            return ()
        if reason := unavailable(header.transport):
            raise DirectError(reason)
        if header.device and header.device == device_id(header.transport):
            raise DirectError(
                f"nccl takes no two ends on one GPU, and learner and generator share {header.device}: set "
                "learner.push_transport to grpc or gloo, or give each a GPU of its own"
            )
        if self._link and self._link.name and self._link.name == header.link:
            return ()
        self.close()
        self._link = Link(header.transport, self._timeout_s)
        self._meeting = self._link.listen(self._host)
        return ((MEETING, str(self._meeting)),)

    async def meet(self) -> None:
        """Wait for the learner, where it was told to come.

        Raises:
            DirectError: The link was not made.
        """
        if self._link and self._meeting:
            meeting, self._meeting = self._meeting, None
            await self._link.accept(meeting)

    async def take(self, into: Bytes) -> None:
        """Fill `into` with the next bytes.

        Raises:
            DirectError: There is no link, or it broke.
        """
        if self._link is None:
            raise DirectError("a frame has its bytes on a direct road, and the push's header names none")
        await self._link.receive(into)

    def close(self) -> bool:
        """End the link, if there is one, and say whether there was; the next push makes another."""
        link, self._link, self._meeting = self._link, None, None
        if link:
            link.close()
        return link is not None
