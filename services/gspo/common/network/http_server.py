"""Serves an app over HTTP: every service's one server, with bounds on headers, time and connections.

Before the app stands http_guard.py. It knows no path.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from gspo.common.config.services import ServicesConfig, TlsConfig
from gspo.common.errors import InputError
from gspo.common.network.credentials import reachable_host
from gspo.common.network.http_connection import REQUEST_TIMEOUT_S, HttpConnection
from gspo.common.network.http_guard import ASGIApp, HttpGuard

# All headers of a request together; a connection that sends more is answered with 400 and closed.
MAX_HEADER_BYTES = 64 * 2**10


class HttpServer:
    """Serves an app on a socket that is bound at once, so that its port is known.

    Args:
        services: Names that the service may be called by, and its certificate; neither where it is None.
        takes_forms: Whether a call that changes something may send a form instead of JSON.
        request_timeout_s: Longest that a request may take to arrive, and that a caller may leave an answer unread.

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
        """Leave signals to runtime.py."""
        yield
