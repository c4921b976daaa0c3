"""A proxy between each service and Redis: it passes bytes on, and can drop a connection in the middle of a reply.

`python -m benchmarks.chaos.harness.redis_proxy FOLDER ROUTES REDIS_PORT`. While the file `drop-NAME` is in the folder,
every third reply to this service is cut in two: the first half arrives, maybe of no byte, and the connection ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

REDIS_HOST = "127.0.0.1"
_DROPPED_SHARE = 1 / 3
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Route:
    """The proxy of one service.

    Attributes:
        host: Where the service connects to, with `port`.
        source: The address that Redis sees; no other service has it.
    """

    name: str
    host: str
    port: int
    source: str


class _Side(asyncio.Protocol):
    """One of two connections; its bytes go to the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        elif self.other.transport is not None:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def join(self, other: _Side) -> None:
        """Pass on to the other side, the early bytes first."""
        self.other, other.other = other, self
        for data in self._early:
            self.data_received(data)
        if self.transport is None or self.transport.is_closing():
            self.connection_lost(None)


class _Replies(_Side):
    """The side of Redis."""

    def __init__(self, drops: Drops) -> None:
        super().__init__()
        self._drops = drops

    def data_received(self, data: bytes) -> None:
        """Pass a reply on, or half of it and the end."""
        if self.other is None or self.other.transport is None or not self._drops.is_next_lost():
            super().data_received(data)
            return
        self.other.transport.write(data[: len(data) // 2 if self._drops.is_half_sent() else 0])
        self.other.transport.close()
        if self.transport is not None:
            self.transport.abort()


class Drops:
    """The choice of the replies to one service that are lost.

    Args:
        file: They are lost while it is there; each writes a line to it.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._drawn = file, random.Random(file.name)
        self._looked_at, self._is_on = 0.0, False

    def is_next_lost(self) -> bool:
        """Whether the connection ends with this reply."""
        if time.monotonic() - self._looked_at > _LOOK_EVERY_S:
            self._looked_at, self._is_on = time.monotonic(), self._file.exists()
        if not self._is_on or self._drawn.random() >= _DROPPED_SHARE:
            return False
        try:
            with self._file.open("r+") as file:  # never a new one: the fault is over where it is gone
                file.seek(0, os.SEEK_END)
                file.write("lost\n")
        except FileNotFoundError:
            return False
        return True

    def is_half_sent(self) -> bool:
        """Whether half of the lost reply arrives; else none of it."""
        return self._drawn.random() < 1 / 2


async def serve(folder: Path, routes: list[Route], redis_port: int) -> None:
    """Pass on until cancelled."""
    loop, connecting = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def connect(route: Route, drops: Drops, service: _Side) -> None:
        try:
            _, redis = await loop.create_connection(
                lambda: _Replies(drops), REDIS_HOST, redis_port, local_addr=(route.source, 0)
            )
        except OSError:
            if service.transport is not None:
                service.transport.abort()
            return
        service.join(redis)

    def accept(route: Route, drops: Drops) -> _Side:
        side = _Side()
        task = loop.create_task(connect(route, drops, side))
        connecting.add(task)
        task.add_done_callback(connecting.discard)
        return side

    for route in routes:
        drops = Drops(folder / f"drop-{route.name}")
        await loop.create_server(lambda r=route, d=drops: accept(r, d), route.host, route.port)  # type: ignore[misc]
    await asyncio.Event().wait()


def command(folder: Path, routes: list[Route], redis_port: int) -> tuple[str, ...]:
    """The command line of its process."""
    routes_json = json.dumps([asdict(route) for route in routes])
    return (sys.executable, "-m", __name__, str(folder), routes_json, str(redis_port))


def main() -> None:
    """Serve until killed."""
    _, folder, routes_json, redis_port = sys.argv
    asyncio.run(serve(Path(folder), [Route(**route) for route in json.loads(routes_json)], int(redis_port)))


if __name__ == "__main__":
    main()
