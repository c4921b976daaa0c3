"""A service with bad input that stays: alive, not ready, with the reason at /readyz, until SIGTERM.

For containers (`--stay`): an orchestrator would start a process that ends again and again.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import NoReturn

import structlog

from gspo.common.errors import EXIT_BAD_INPUT, InputError
from gspo.common.network.http_guard import ASGIApp, Receive, Scope, Send, reply
from gspo.common.network.http_server import HttpServer

log = structlog.get_logger()


def serve_rejection(error: InputError, host: str, port: int) -> NoReturn:
    """Serve the reason at /readyz until SIGTERM or SIGINT, and exit with code 2.

    It exits at once if the port cannot be bound.
    """
    log.error("bad_input", reason=str(error), detail="staying, not ready; SIGTERM ends it")
    asyncio.run(_stay(str(error), host, port))
    sys.exit(EXIT_BAD_INPUT)


async def _stay(reason: str, host: str, port: int) -> None:
    try:
        http = HttpServer(_rejection_app(reason), host, port)
    except InputError as bind_error:
        log.error("bad_input", reason=str(bind_error))
        return
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    serving = asyncio.create_task(http.run())
    await stopping.wait()
    serving.cancel()


def _rejection_app(reason: str) -> ASGIApp:
    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["path"] == "/healthz":
            await reply(send, 200, {"status": "alive"})
        else:
            await reply(send, 503, {"ready": False, "problems": {"bad_input": reason}})

    return app
