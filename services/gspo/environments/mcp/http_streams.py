"""MCP's messages over streamable HTTP, by the package `mcp`: the bounds of an answer, and why a server refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx2
from mcp.client.streamable_http import streamable_http_client

from gspo.common.network.outer_http import no_cookies, outer_headers
from gspo.environments.mcp.stdio_streams import MAX_MESSAGE_BYTES, TOO_LARGE
from gspo.environments.session_server import (
    CONNECT_TIMEOUT_S,
    ServerTroubleError,
    server_header,
    trouble_of_status,
)

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

_SESSION_HEADER = "mcp-session-id"


class HttpStreams:
    """The messages of one session of a server.

    Attributes:
        refusal: Why the server refused the newest request; None where it did not.
        pid, last_line: Only a program has them.
    """

    pid, last_line = None, ""

    def __init__(self, url: str) -> None:
        self._url = url
        self.refusal: ServerTroubleError | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[TransportStreams]:
        """Exchange messages; the session ends with the block."""
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        transport = _BoundedTransport(self)
        headers = outer_headers(server_header())
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout, transport=transport, cookies=no_cookies()) as client,
            streamable_http_client(self._url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
        ):
            yield streams

    def on_answer(self, request: httpx2.Request, answer: httpx2.Response) -> None:
        """Note why the server refuses a request."""
        if request.method != "POST":
            return
        status, retry_after = answer.status_code, answer.headers.get("retry-after")
        lost = (404,) if _SESSION_HEADER in request.headers else ()
        self.refusal = None if status < 400 else trouble_of_status(self._url, status, retry_after, lost=lost)


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, streams: HttpStreams) -> None:
        super().__init__()
        self._streams = streams

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = await super().handle_async_request(request)
        self._streams.on_answer(request, answer)
        assert isinstance(answer.stream, httpx2.AsyncByteStream)  # noqa: S101 - of an asynchronous transport
        if (encoding := answer.headers.pop("content-encoding", "identity").lower()) != "identity":
            answer.stream = _RefusedStream(answer.stream, f"the result is encoded as {encoding}, against the request")
            answer.headers["content-type"] = "application/json"  # the client reads it whole, and so meets the refusal
            return answer
        if not answer.headers.get("content-type", "").lower().startswith("text/event-stream"):  # that has its own limit
            answer.stream = _BoundedStream(answer.stream)
        return answer


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._inner:
            num_bytes += len(part)
            if num_bytes > MAX_MESSAGE_BYTES:
                raise httpx2.StreamError(TOO_LARGE)  # the client makes it the answer to this request
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()


class _RefusedStream(_BoundedStream):
    def __init__(self, inner: httpx2.AsyncByteStream, why: str) -> None:
        super().__init__(inner)
        self._why = why

    async def __aiter__(self) -> AsyncIterator[bytes]:
        raise httpx2.StreamError(self._why)
        yield b""
