"""The HTTP server of every service, with bounds on headers, time and connections; http_guard.py checks each request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gspo.common.config.services import ServicesConfig, TlsConfig
from gspo.common.errors import InputError
from gspo.common.network.auth_log import note_refusal
from gspo.common.network.credentials import reachable_host
from gspo.common.network.http_guard import ASGIApp, HttpGuard

# All headers of a request together; a connection that sends more is answered with 400 and closed.
MAX_HEADER_BYTES = 64 * 2**10
# From the first byte of a request to the last of its body; and for a caller to go on reading an answer.
REQUEST_TIMEOUT_S = 30.0
# One address may not take all connections: Prometheus and kubelet come from others.
MAX_CONNECTIONS, MAX_CONNECTIONS_OF_ONE = 512, 256


class HttpServer:
    """Serves an app on a socket that is bound at once, so that its port is known.

    Args:
        services: The service's host names and certificate; neither where it is None.
        takes_forms: Whether a change may come as a multipart form instead of JSON.
        request_timeout_s: Longest time for a request to arrive, and for a caller to leave an answer unread.

    Raises:
        InputError: The address cannot be bound.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        services: ServicesConfig | None = None,
        *,
        takes_forms: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._socket = _bound(host, port)
        self.address = f"{reachable_host(host)}:{self._socket.getsockname()[1]}"
        tls = services.tls if services else TlsConfig()
        names = [host, *(services.http_hosts if services else ()), *filter(None, (tls.server_name,))]
        settings = uvicorn.Config(
            HttpGuard(app, names, takes_forms=takes_forms),
            http=type("Connection", (HttpConnection,), {"timeout_s": request_timeout_s}),
            # A request for a websocket is then an ordinary request, which the guard refuses.
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            # Each message that is not HTTP would be a warning.
            log_level="error",
            access_log=False,
            lifespan="off",
        )
        if tls.cert is not None:
            settings.ssl_certfile, settings.ssl_keyfile = tls.cert, tls.key
        self._server = _QuietServer(settings)

    async def run(self) -> None:
        """Serve until cancelled; the address is free then."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self.close()

    def close(self) -> None:
        """Free the address; uvicorn leaves that to the event loop where it is cancelled."""
        for server in getattr(self._server, "servers", ()):
            server.close()
        self._socket.close()


def _bound(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise InputError(
            "--http-port",
            f"{port} cannot be bound on {host} ({error.strerror})",
            "End what listens there, or give another port; 0 picks a free one",
        ) from error


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to service/app.py."""
        yield


class HttpConnection(H11Protocol):
    """One connection with a deadline for its caller, and a bound on their number.

    uvicorn alone would wait for a caller for ever. By h11: uvicorn's other protocol, httptools, keeps headers without
    end.
    """

    timeout_s = REQUEST_TIMEOUT_S
    _request: asyncio.TimerHandle | None = None
    _answer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept it, unless there are too many."""
        super().connection_made(transport)
        num_of_one = sum(_address(self) == _address(other) for other in self.connections)
        if len(self.connections) > MAX_CONNECTIONS or num_of_one > MAX_CONNECTIONS_OF_ONE:
            num = len(self.connections)
            self._end("connections", f"there are {num} connections, {num_of_one} of them from this address")
        else:
            self._watch_request()

    def handle_events(self) -> None:
        """Read the bytes that have arrived, and see whether the request is whole."""
        super().handle_events()
        self._watch_request()

    def _watch_request(self) -> None:
        """Count the time from a request's first byte until it is whole."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            _cancel(self._request)
            self._request = None
        elif self._request is None:
            self._request = self._later("a request was not whole")

    def pause_writing(self) -> None:
        """The caller has stopped reading: give it a deadline."""
        super().pause_writing()
        self._answer = self._answer or self._later("an answer was left unread")

    def resume_writing(self) -> None:
        """The caller reads again."""
        _cancel(self._answer)
        self._answer = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also where the end of an answer is still unread."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines."""
        _cancel(self._request)
        _cancel(self._answer)
        super().connection_lost(exc)

    def _later(self, what: str) -> asyncio.TimerHandle:
        return self.loop.call_later(self.timeout_s, self._end, "slow", f"{what} after {self.timeout_s:g} s")

    def _end(self, reason: str, detail: str) -> None:
        note_refusal("http", reason, caller=f"{_address(self)}:", target="", detail=detail)
        self.transport.abort()


def _address(connection: Any) -> str:
    """The caller's address, without its port."""
    return connection.client[0] if connection.client else ""


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
