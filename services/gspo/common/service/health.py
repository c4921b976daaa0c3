"""The HTTP face that every service has: /healthz, /readyz and /metrics, and whatever app the service adds.

A plain ASGI app, so that services without a REST API need no web framework.
"""

from __future__ import annotations

import hmac
from importlib.metadata import version

from prometheus_client import CollectorRegistry, make_asgi_app

from gspo.common.network.auth_log import note_refusal
from gspo.common.network.http_guard import ASGIApp, Receive, Scope, Send, caller_of, header, reply
from gspo.common.service.app import Service
from gspo.common.telemetry import metrics


class HealthProbes:
    """Answers the probes itself and hands every other path to the service's own app, behind the shared token.

    Args:
        guards_itself: The app knows who may call it; the shared token is not asked for here.
    """

    def __init__(self, service: Service, app: ASGIApp | None = None, *, guards_itself: bool = False) -> None:
        self._service, self._app = service, app
        token = "" if guards_itself else service.options.token
        self._expected = f"Bearer {token}".encode() if token else b""
        registry = CollectorRegistry()
        registry.register(metrics.ServiceCollector(service.options.service))
        self._metrics: ASGIApp = make_asgi_app(registry)
        metrics.BUILD_INFO.labels(service.options.service, version("gspo")).set(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith("/metrics"):
            await self._metrics(scope, receive, send)
        elif path == "/healthz":
            await reply(send, 200, {"status": "alive"})
        elif path == "/readyz":
            problems = self._service.problems
            await reply(
                send, 503 if problems else 200, {"ready": not problems, "problems": problems} | self._service.facts
            )
        elif not self._is_authorized(scope):
            why = "the shared token is missing or wrong: send it as 'Authorization: Bearer TOKEN'"
            note_refusal("http", "token", caller=caller_of(scope), asked=path, detail=why)
            await reply(send, 401, {"detail": why})
        elif self._app is not None:
            await self._app(scope, receive, send)
        else:
            await reply(send, 404, {"detail": f"{path} is not here; try /healthz, /readyz, /metrics"})

    def _is_authorized(self, scope: Scope) -> bool:
        given = header(scope, b"authorization").encode("latin-1")
        return not self._expected or hmac.compare_digest(given, self._expected)
