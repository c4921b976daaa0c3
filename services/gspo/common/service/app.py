"""The application skeleton of every service: startup, main loop, background tasks, shutdown.

A service describes itself by a `Startup`: an asynchronous context manager that loads what the service needs and yields
an `App`. `run_app` holds the order of everything around it, `run_process` the signals and the exit code.
"""

import asyncio
import gc
import os
import signal
import sys
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import structlog

from gspo.common.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_START_AGAIN, InputError, StartAgainError
from gspo.common.network.accepting import raise_descriptor_limit
from gspo.common.network.credentials import redis_refusal
from gspo.common.network.grpc_server import GrpcApi, GrpcServer
from gspo.common.network.http_server import ASGIApp, HttpServer
from gspo.common.service.failure import log_failure
from gspo.common.service.health import HealthProbes
from gspo.common.service.options import Options, stay
from gspo.common.service.traces import Traces
from gspo.common.streams.events import Events
from gspo.common.streams.instances import Instance, Registration
from gspo.common.streams.keys import Keys
from gspo.common.streams.redis_client import connect_redis
from gspo.common.tasks import cancel_all, first_error, run_until_cancelled
from gspo.common.telemetry.activity import STARTING, Activity

log = structlog.get_logger()
Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class Service:
    """A running service process: its connections, its activity, its readiness.

    Attributes:
        uid: Identity of this process in its run; a successor has another.
        stopping: Set when the process has been asked to drain.
        run_ended: Set when the events say that the run has ended; of services that end with it.
        problems: Why it is not ready, by cause; ready where empty.
        facts: Further fields of /readyz.
        http_api: Answers every HTTP request but the probes; None until the startup sets it.
        traces: Where the spans of rollouts go.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.config = options, options.config
        self.uid = uuid.uuid4().hex[:12]
        self.keys = Keys(self.config.name)
        self.redis = connect_redis(options.redis_url, self.config)
        self.activity = Activity(options.service)
        self.traces = Traces(
            options.service,
            name=options.name,
            run=self.config.name,
            endpoint=self.config.services.otlp_endpoint,
        )
        self.stopping, self.run_ended = asyncio.Event(), asyncio.Event()
        self.problems: dict[str, str] = {STARTING: "the service is starting"}
        self.facts: dict[str, str] = {}
        self.http_api: ASGIApp | None = None

    async def close(self) -> None:
        """Export the last spans and close the connections to Redis."""
        await asyncio.to_thread(self.traces.close)
        await self.redis.aclose()


@dataclass(frozen=True)
class App:
    """The main loop of a service, the work beside it, and its gRPC API.

    Attributes:
        main: The main loop; its end is the end of the process.
        background: Work beside it, by name, cancelled at its end. An error of any ends the process with that error.
        facts: Facts of the heartbeat, read at every beat.
        sets_ready: The main loop removes STARTING from the service's problems; else the service is ready at once.
    """

    main: Work
    background: Mapping[str, Work] = field(default_factory=dict)
    grpc: GrpcApi | None = None
    facts: Callable[[], dict[str, Any]] = dict
    sets_ready: bool = False


Startup: TypeAlias = Callable[[Service], AbstractAsyncContextManager[App]]
Claim: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]


async def run_app(
    service: Service,
    startup: Startup,
    *,
    claim: Claim = nullcontext,
    http_port: int = 0,
    authorizes_itself: bool = False,
    takes_forms: bool = False,
    ends_with_run: bool = False,
) -> None:
    """Start, run the main loop to its end, shut down in the reverse order, and close the service.

    Args:
        claim: Entered before the heartbeat begins: it takes a resource that one process of the run may own.
        http_port: The port, unless the command line names one; 0 picks a free one.
        authorizes_itself: The HTTP API checks its callers; the shared token is not required.
        takes_forms: A change may come as a multipart form.
        ends_with_run: The end of the run, read from the events, drains the service.

    Raises:
        Exception: The first error of the startup, the main loop or a background task.
    """
    options, error = service.options, None
    try:
        probes = HealthProbes(service, authorizes_itself=authorizes_itself)
        port = options.http_port or http_port
        http = HttpServer(probes, options.host, port, service.config.services, takes_forms=takes_forms)
        await _run(service, startup, claim, http, ends_with_run=ends_with_run)
    except BaseExceptionGroup as errors:
        error = first_error(errors)
    finally:
        await service.close()
    if error is not None:
        raise error


async def _run(service: Service, startup: Startup, claim: Claim, http: HttpServer, *, ends_with_run: bool) -> None:
    options, name = service.options, service.options.name
    events = Events(service.redis, service.keys, name)
    position = await events.newest()  # before the startup: a Finished from before a resume must not end this run
    instance = Instance(options.service, name, http=http.address, pid=os.getpid(), uid=service.uid)
    registration = Registration(service.redis, service.keys, instance, service.activity, dict)
    async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:

        def start(works: Mapping[str, Work]) -> set[asyncio.Task[None]]:
            tasks = {group.create_task(run_until_cancelled(name, work), name=name) for name, work in works.items()}
            stack.push_async_callback(cancel_all, tasks)
            return tasks

        stack.callback(http.close)
        start({"http": http.run})
        await stack.enter_async_context(claim())
        heartbeat = start({"heartbeat": registration.run})
        app = await stack.enter_async_context(startup(service))
        if app.grpc is not None:
            tls = service.config.services.tls
            server = GrpcServer(app.grpc, host=options.host, port=options.grpc_port, token=options.token, tls=tls)
            await server.start()
            stack.push_async_callback(server.stop, app.grpc.grace_s)
            await registration.open(server.address, app.facts)
        # The heartbeat ends before the gRPC server: others then no longer call it.
        stack.push_async_callback(cancel_all, heartbeat)
        start(app.background)
        if ends_with_run:
            start({"run_end": lambda: _stop_at_run_end(service, events, position)})
        if not app.sets_ready:
            service.problems.pop(STARTING, None)
        # The objects of the startup stay to the end: the garbage collector need not look through them again.
        gc.collect()
        gc.freeze()
        await run_until_cancelled("main", app.main)


async def _stop_at_run_end(service: Service, events: Events, position: bytes) -> None:
    finished = await events.wait_for_finished(position)
    log.info("run_finished", reason=finished.reason)
    service.run_ended.set()
    service.stopping.set()


def run_process(options: Options, main: Callable[[Service], Coroutine[Any, Any, None]]) -> NoReturn:
    """Run a service to its end and exit: 0 done or drained, 1 failed and logged, 2 bad input, 4 to start again.

    SIGTERM or SIGINT asks it to drain; a second one ends it at once.
    """
    raise_descriptor_limit()
    try:
        sys.exit(asyncio.run(_exit_code(options, main)))
    except InputError as error:
        if options.stay:
            stay(error, options.host, options.http_port)
        log_failure("bad_input", error, str(error))
        sys.exit(EXIT_BAD_INPUT)


async def _exit_code(options: Options, main: Callable[[Service], Coroutine[Any, Any, None]]) -> int:
    loop = asyncio.get_running_loop()
    try:
        service = Service(options)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _on_signal, service)
        await main(service)
    except InputError:
        raise
    except StartAgainError as error:
        log.error("start_again", reason=str(error))
        return EXIT_START_AGAIN
    except asyncio.CancelledError:
        log.info("cancelled")
    except Exception as error:
        if refusal := redis_refusal(error):
            raise refusal from error
        log_failure("service_failed", error, f"{type(error).__name__}: {error}")
        return EXIT_FAILED
    log.info("service_ended")
    return 0


def _on_signal(service: Service) -> None:
    if service.stopping.is_set():
        os._exit(EXIT_FAILED)
    log.info("stopping", detail="draining; a second signal ends at once")
    service.stopping.set()
