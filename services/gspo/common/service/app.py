"""The life of a service process: signals, background tasks, its end.

SIGTERM asks it to drain, a second one ends it at once; a background task that dies ends the process with its reason.
It knows nothing of what a service does.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import structlog

from gspo.common.errors import EXIT_BAD_INPUT, EXIT_FAILED, InputError
from gspo.common.network.credentials import redis_refusal
from gspo.common.service.options import Options, stay
from gspo.common.service.redis_client import connect_redis
from gspo.common.service.tasks import end_tasks
from gspo.common.service.traces import Traces
from gspo.common.streams.keys import Keys
from gspo.common.telemetry.activity import STARTING, Activity

log = structlog.get_logger()


class Service:
    """One running service process: its connections, its activity, its end.

    Attributes:
        stopping: Set when the process has been asked to drain.
        problems: What keeps it from being ready, by cause; empty is ready.
        facts: What /readyz tells beside that.
        traces: Where the spans of rollouts go.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.config = options, options.config
        self.keys = Keys(self.config.name)
        self.redis = connect_redis(options.redis_url, self.config)
        self.activity = Activity(options.service)
        self.traces = Traces(
            options.service,
            name=options.name,
            run=self.config.name,
            endpoint=self.config.services.otlp_endpoint,
        )
        self.stopping = asyncio.Event()
        self.problems: dict[str, str] = {STARTING: "the service is starting"}
        self.facts: dict[str, str] = {}

    async def run(self, main: Coroutine[Any, Any, None], background: dict[str, Coroutine[Any, Any, Any]]) -> None:
        """Run the main loop to its end, and the background tasks as long as it lasts.

        Raises:
            Exception: Whatever ended the main loop or a background task.
        """
        # What the start made stays to the end: the collector need not look through it again and again.
        gc.collect()
        gc.freeze()
        tasks = {asyncio.create_task(task, name=name) for name, task in background.items()}
        main_task = asyncio.create_task(main, name="main")
        pending = {main_task, *tasks}
        try:
            while main_task in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await end_tasks({main_task, *tasks})
            await asyncio.to_thread(self.traces.close)
            await self.redis.aclose()


def run_service(options: Options, life: Callable[[Service], Coroutine[Any, Any, None]]) -> NoReturn:
    """Run a service's life to its end and exit: 0 done or drained, 1 failed with the reason logged, 2 refused."""
    try:
        sys.exit(asyncio.run(_run(options, life)))
    except InputError as error:
        if options.stay:
            stay(error, options.host, options.http_port)
        log.error("bad_input", reason=str(error))
        sys.exit(EXIT_BAD_INPUT)


async def _run(options: Options, life: Callable[[Service], Coroutine[Any, Any, None]]) -> int:
    loop = asyncio.get_running_loop()
    try:
        service = Service(options)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _on_signal, service)
        await life(service)
    except InputError:
        raise
    except asyncio.CancelledError:
        log.info("cancelled")
    except Exception as error:
        if refusal := redis_refusal(error):
            raise refusal from error
        log.exception("service_failed", reason=f"{type(error).__name__}: {error}")
        return EXIT_FAILED
    log.info("service_ended")
    return 0


def _on_signal(service: Service) -> None:
    if service.stopping.is_set():
        os._exit(EXIT_FAILED)
    log.info("stopping", detail="draining; a second signal ends at once")
    service.stopping.set()
