"""The HTTP server of every service: /healthz, /readyz and /metrics, and the service's own API behind the shared token.

A plain ASGI app, so that services without a REST API need no web framework. A service with bad input that stays
(`--stay`, for containers) answers here too: an orchestrator would start one that ends again and again.
"""

import asyncio
import signal
import sys
from importlib.metadata import version
from typing import NoReturn, Protocol

import structlog
from prometheus_client import make_asgi_app

from gspo.common.errors import EXIT_BAD_INPUT, InputError
from gspo.common.network.caller_key import WRONG_KEY, caller_key, is_token, refuse_key
from gspo.common.network.http_server import ASGIApp, HttpServer, Receive, Scope, Send, reply
from gspo.common.service.options import Options
from gspo.common.telemetry import metrics
from gspo.common.telemetry.activity import STARTING

log = structlog.get_logger()


class ProbedService(Protocol):
    """A service, as far as its HTTP server needs it; `Service` has the meanings."""

    options: Options
    problems: dict[str, str]
    facts: dict[str, str]
    http_api: ASGIApp | None


class HealthProbes:
    """Answers the probes itself and hands every other path to the service's own API.

    Args:
        authorizes_itself: The API checks its callers; the shared token is not required.
    """

    def __init__(self, service: ProbedService, *, authorizes_itself: bool = False) -> None:
        self._service = service
        self._token = "" if authorizes_itself else service.options.token
        self._metrics: ASGIApp = make_asgi_app(metrics.served_by(service.options.service))
        metrics.BUILD_INFO.labels(service.options.service, version("gspo")).set(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, problems = scope["path"], self._service.problems
        if path.startswith("/metrics"):
            await self._metrics(scope, receive, send)
        elif path == "/healthz":
            await reply(send, 200, {"status": "alive"})
        elif path == "/readyz":
            facts = {"ready": not problems, "problems": problems} | self._service.facts
            await reply(send, 503 if problems else 200, facts)
        elif not is_token(caller_key(scope), self._token):
            await refuse_key(scope, send, WRONG_KEY)
        elif self._service.http_api is not None:
            await self._service.http_api(scope, receive, send)
        elif STARTING in problems:
            await reply(send, 503, {"detail": "the service is starting; /readyz tells when it is ready"})
        else:
            await reply(send, 404, {"detail": f"{path} is not here; try /healthz, /readyz, /metrics"})


def serve_rejection(error: InputError, host: str, port: int) -> NoReturn:
    """Serve the reason at /readyz until SIGTERM or SIGINT, and exit with code 2.

    It exits at once if the port cannot be bound.
    """
    log.error("bad_input", reason=str(error), detail="staying, not ready; SIGTERM ends it")
    asyncio.run(_stay(str(error), host, port))
    sys.exit(EXIT_BAD_INPUT)


async def _stay(reason: str, host: str, port: int) -> None:
    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["path"] == "/healthz":
            await reply(send, 200, {"status": "alive"})
        else:
            await reply(send, 503, {"ready": False, "problems": {"bad_input": reason}})

    try:
        http = HttpServer(app, host, port)
    except InputError as bind_error:
        log.error("bad_input", reason=str(bind_error))
        return
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    serving = asyncio.create_task(http.run())
    await stopping.wait()
    serving.cancel()
