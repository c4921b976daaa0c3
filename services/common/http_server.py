"""Serves an app over HTTP: every service's one server, with bounds on headers, time and connections.

Before the app stands http_guard.py. It knows no path. Neighbours: probes.py is the app of most services.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.common.errors import InputError
from services.common.http_guard import App, HttpGuard
from services.common.refusals import note_refusal
from services.common.services_config import ServicesConfig, TlsConfig
from services.common.trust import reachable_host

# All headers of a request together; a connection that sends more is answered with 400 and closed.
MAX_HEADER_BYTES = 64 * 2**10
# From the first byte of a request to the last of its body.
REQUEST_TIMEOUT_S = 30.0
# One address may not take all connections: Prometheus and kubelet come from others.
MAX_CONNECTIONS, MAX_CONNECTIONS_OF_ONE = 512, 256


class HttpServer:
    """Serves an app on a socket that is bound at once, so that its port is known.

    Args:
        services: Names that the service may be called by, and its certificate; neither where it is None.
        takes_forms: Whether a call that changes something may send a form instead of JSON.
        request_timeout_s: Longest that a request may take to arrive.

    Raises:
        InputError: The address cannot be bound.
    """

    def __init__(
        self,
        app: App,
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
            http=_protocol(request_timeout_s),
            # A request to become a websocket is then a request like any other, which the guard refuses.
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            # Bytes that are no HTTP would be a warning each.
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
        """Leave signals to runtime.py."""
        yield


def _address(connection: Any) -> str:
    """Of the other end, without its port."""
    return connection.client[0] if connection.client else ""


def _protocol(request_timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which waits for a request for ever and takes any number of connections, with bounds.

    Its other one, httptools, keeps headers without end.
    """

    class BoundedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            address = _address(self)
            num_of_one = sum(address == _address(other) for other in self.connections)
            if len(self.connections) > MAX_CONNECTIONS or num_of_one > MAX_CONNECTIONS_OF_ONE:
                detail = f"there are {len(self.connections)} connections, {num_of_one} of them from this address"
                note_refusal("http", "connections", caller=f"{address}:", asked="", detail=detail)
                transport.abort()
            else:
                self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_deadline()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Count the time from a request's first byte until it is whole."""
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self._forget_deadline()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(request_timeout_s, self._give_up)

        def _forget_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = None

        def _give_up(self) -> None:
            detail = f"a request was not whole after {request_timeout_s:g} s"
            note_refusal("http", "slow", caller=f"{_address(self)}:", asked="", detail=detail)
            self.transport.abort()

    return BoundedProtocol
