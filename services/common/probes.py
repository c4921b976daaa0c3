"""The HTTP face that every service has: /healthz, /readyz and /metrics, and whatever app the service adds.

A plain ASGI app, so that services without a REST door need no web framework. Neighbour: runtime.py.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from importlib.metadata import version
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, make_asgi_app

from services.common import metrics
from services.common.errors import InputError
from services.common.refusals import note_refusal
from services.common.runtime import Service
from services.common.services_config import TlsConfig
from services.common.trust import reachable_host

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Probes:
    """Answers the probes itself and hands every other path to the service's own app, behind the shared token.

    Args:
        guards_itself: The app knows who may call it; the shared token is not asked for here.
    """

    def __init__(self, service: Service, app: App | None = None, *, guards_itself: bool = False) -> None:
        self._service, self._app = service, app
        token = "" if guards_itself else service.options.token
        self._expected = f"Bearer {token}".encode() if token else b""
        registry = CollectorRegistry()
        registry.register(metrics.Served(service.options.service))
        self._metrics: App = make_asgi_app(registry)
        metrics.BUILD_INFO.labels(service.options.service, version("gspo")).set(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith("/metrics"):
            await self._metrics(scope, receive, send)
        elif path == "/healthz":
            await reply(send, 200, {"status": "alive"})
        elif path == "/readyz":
            problems = self._service.problems
            await reply(
                send, 503 if problems else 200, {"ready": not problems, "problems": problems} | self._service.facts
            )
        elif not self._may_enter(scope):
            why = "the shared token is missing or wrong: send it as 'Authorization: Bearer TOKEN'"
            note_refusal("http", "token", caller=_caller(scope), asked=path, detail=why)
            await reply(send, 401, {"detail": why})
        elif self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await reply(send, 404, {"detail": f"{path} is not here; try /healthz, /readyz, /metrics"})

    def _may_enter(self, scope: Scope) -> bool:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        return not self._expected or hmac.compare_digest(given, self._expected)


def _caller(scope: Scope) -> str:
    host, port = scope.get("client") or ("unknown", 0)
    return f"{host}:{port}"


class HttpServer:
    """Serves an app on a socket that is bound at once, so that its port is known.

    Args:
        tls: Plain text where it is None or not on.

    Raises:
        InputError: The address cannot be bound.
    """

    def __init__(self, app: App, host: str, port: int, tls: TlsConfig | None = None) -> None:
        self._socket = _bound(host, port)
        self.address = f"{reachable_host(host)}:{self._socket.getsockname()[1]}"
        settings = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        if tls is not None and tls.cert is not None:
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


async def reply(send: Send, status: int, body: dict[str, Any]) -> None:
    """Answer one request with JSON."""
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
