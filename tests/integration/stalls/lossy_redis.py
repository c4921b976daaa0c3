"""A TCP proxy before Redis that lets a command pass and loses its reply, as a connection does that breaks off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class LossyRedis:
    """The proxy.

    Attributes:
        url: That of Redis behind it.
        num_lost: Replies that were lost.
    """

    def __init__(self, redis_url: str) -> None:
        parts = urlsplit(redis_url)
        self._host, self._port = str(parts.hostname), int(parts.port or 6379)
        self.url, self.num_lost = "", 0
        self._word: bytes | None = None

    def lose_reply_to(self, word: bytes) -> None:
        """Redis carries out the next command that contains `word`; its reply is lost with the connection."""
        self._word = word

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[LossyRedis]:
        """Serve within the block."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        try:
            yield self
        finally:
            server.close()

    async def _connected(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        redis, to_redis = await asyncio.open_connection(self._host, self._port)
        is_losing = asyncio.Event()

        async def send() -> None:
            while data := await client.read(1 << 20):
                if self._word is not None and self._word in data:
                    self._word = None
                    is_losing.set()
                to_redis.write(data)
            to_redis.close()

        sending = asyncio.create_task(send())
        try:
            while data := await redis.read(1 << 20):
                if is_losing.is_set():
                    if not data.startswith(b"-"):  # a script that Redis does not have yet was not carried out
                        self.num_lost += 1
                        break
                    self._word = b"EVALSHA"
                    is_losing.clear()
                to_client.write(data)
        finally:
            to_client.close()
            to_redis.close()
            sending.cancel()
