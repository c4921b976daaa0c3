"""The life of a service process: options, logs, signals, background tasks, its end.

SIGTERM asks it to drain, a second one ends it at once; a background task that dies ends the process with its reason.
It knows nothing of what a service does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import io
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast
from urllib.parse import urlsplit

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gspo.common.config.loading import read_config
from gspo.common.config.schema import Config
from gspo.common.errors import EXIT_BAD_INPUT, InputError
from gspo.common.network.credentials import (
    check_credentials,
    redis_arguments,
    redis_refusal,
    shared_token,
    warn_of_plain_text,
)
from gspo.common.service.redis_cancellation import cancellable
from gspo.common.service.redis_client import PatientRedis
from gspo.common.service.start_command import receive_start_command, report_checked
from gspo.common.service.traces import Traces
from gspo.common.streams.keys import Keys
from gspo.common.telemetry.activity import Activity

EXIT_FAILED = 1
CONFIG_NAME = "config.yaml"
# Redis may restart under a run; a client tries again for about this long before its service gives up.
REDIS_PATIENCE_S = 60
CANCEL_PATIENCE_S = 5.0
# Hundreds of rollouts may end at once, each with a write: they wait for a connection instead of failing.
MAX_CONNECTIONS = 50
# The cause that keeps a service from being ready until it has started.
STARTING = "starting"
REDIS_VARIABLE = "GSPO_REDIS_URL"
_REDIS_ON_LOOPBACK = "redis://127.0.0.1:6379/0"
log = structlog.get_logger()


@dataclass(frozen=True)
class Options:
    """What a service is told at its start; everything else is in the run's configuration."""

    service: str
    run_dir: Path
    redis_url: str
    name: str
    host: str
    http_port: int
    grpc_port: int
    resume: bool
    config: Config
    evaluate: bool = False
    stay: bool = False
    waits: bool = False

    @property
    def token(self) -> str:
        """The shared token of the services; empty where there is none."""
        return shared_token(self.config)


def parse_options(
    service: str, check: Callable[[Config], None], *, meaning: str, checks_at_startup: bool = False
) -> Options:
    """Read the command line of `python -m services.X`; `--check FILE` runs the service's own check and exits.

    With `--wait` it does not exit: the options then hold the configuration alone, for `await_start`.

    Exits with code 2 and one message where the input cannot work; under `--stay`, where nobody has checked before the
    start, the check is run here, and the process stays, not ready, with that message.

    Args:
        checks_at_startup: The service's life begins with the same check, which takes long.
    """
    parser = _parser(service, meaning)
    given = parser.parse_args()
    name = given.name.replace("{host}", socket.gethostname())
    try:
        if given.check:
            config = read_config(given.check)
            check(config)
            if not given.wait:
                sys.exit(0)
            report_checked()
            return Options(service, Path(), "", name, "", 0, 0, resume=False, config=config, waits=True)
        if not given.run_dir:
            parser.error("--run-dir or --check is needed")
        config = read_config(given.run_dir / CONFIG_NAME)
        host = given.host or config.services.host
        redis_url = given.redis_url or os.environ.get(REDIS_VARIABLE) or config.services.redis_url or _REDIS_ON_LOOPBACK
        check_credentials(config, host, redis_url)
        set_up_logs(config.services.log_level, service=service, name=name, run=config.name)
        warn_of_plain_text(config, host)
        if given.stay and not checks_at_startup:
            check(config)
    except InputError as error:
        if not given.stay:
            exit_bad_input(error)
        set_up_logs("info", service=service, name=name)
        stay(error, given.host or "127.0.0.1", given.http_port)
    return Options(
        service,
        given.run_dir,
        redis_url,
        name,
        host,
        given.http_port,
        given.grpc_port,
        given.resume,
        config,
        given.evaluate,
        given.stay,
    )


def await_start(options: Options) -> Options:
    """The options of a process that waits, once it is told to start; of any other, the same."""
    if not options.waits:
        return options
    receive_start_command()
    return parse_options(options.service, lambda _config: None, meaning="")


def _parser(service: str, meaning: str) -> argparse.ArgumentParser:
    """The options that every service has."""
    parser = argparse.ArgumentParser(prog=f"python -m gspo.{service}", description=meaning)
    parser.add_argument("--check", type=Path, metavar="FILE", help="check a configuration for this service, and exit")
    parser.add_argument("--wait", action="store_true", help="after --check, wait on standard input for a start")
    parser.add_argument("--run-dir", type=Path, help="the run directory; its config.yaml is the configuration")
    parser.add_argument(
        "--redis-url",
        type=_redis_address,
        help=f"{REDIS_VARIABLE}, services.redis_url, or {_REDIS_ON_LOOPBACK}, by default",
    )
    parser.add_argument(
        "--name", default=f"{service}-0", help="name of this process in the run; {host} is this machine's"
    )
    parser.add_argument("--host", help="address to bind; services.host by default")
    parser.add_argument("--http-port", type=int, default=0, help="0 picks a free port")
    parser.add_argument("--grpc-port", type=int, default=0, help="0 picks a free port")
    parser.add_argument("--resume", action="store_true", help="go on from what the run directory holds")
    parser.add_argument("--evaluate", action="store_true", help="measure the given model once: a run without a learner")
    parser.add_argument(
        "--stay", action="store_true", help="refused, stay alive and not ready with the reason, for containers"
    )
    return parser


def exit_bad_input(error: InputError) -> NoReturn:
    """Say what is wrong with the input and exit with code 2."""
    print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the message is for the person who called
    sys.exit(EXIT_BAD_INPUT)


def stay(error: InputError, host: str, http_port: int) -> NoReturn:
    """Say what is wrong with the input, and stay until SIGTERM with that at /readyz; then exit with code 2."""
    from gspo.common.service.degraded_start import serve_rejection  # here: its face is built on this module

    serve_rejection(error, host, http_port)


def _redis_address(url: str) -> str:
    """A password on a command line could be read by every user of the machine."""
    if urlsplit(url).password is not None:
        raise argparse.ArgumentTypeError(
            f"holds a password; write it into a file and name that in services.redis_password_file, or set "
            f"{REDIS_VARIABLE}"
        )
    return url


def set_up_logs(level: str, **bound: str) -> None:
    """JSON lines on standard error, every one with the bound fields."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _LossyStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**bound)


class _LossyStream(io.TextIOBase):
    """A stream whose full disk, or closed pipe, costs the lines and not the process that says them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, as far as there is room."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, as far as there is room."""
        with contextlib.suppress(OSError):
            self._stream.flush()


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


async def end_tasks(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they are done, CANCEL_PATIENCE_S at most: a client that reads can swallow a cancellation."""
    deadline = time.monotonic() + CANCEL_PATIENCE_S
    while tasks and time.monotonic() < deadline:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=0.5)
    if tasks:
        log.error("tasks_left", names=sorted(task.get_name() for task in tasks))


class _Patience(Retry):
    """Tries again while Redis restarts, but not where it refuses us: that does not pass."""

    async def call_with_retry(
        self, do: Any, fail: Any, is_retryable: Any = None, with_failure_count: bool = False
    ) -> Any:
        """As Retry does it."""
        return await super().call_with_retry(do, fail, is_retryable or _may_pass, with_failure_count)


def _may_pass(error: Exception) -> bool:
    return redis_refusal(error) is None


def connect_redis(url: str, config: Config | None = None) -> Redis:
    """A client with binary replies that tries again while Redis restarts, REDIS_PATIENCE_S long.

    While Redis answers and refuses writes, for lack of room, it waits without an end.

    Args:
        config: Where its password and certificates are; None where it needs none.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        **(redis_arguments(url, config) if config else {}),
        max_connections=MAX_CONNECTIONS,
        timeout=REDIS_PATIENCE_S,
        protocol=2,
        socket_connect_timeout=5,
        socket_timeout=30,
        health_check_interval=15,
        retry=_Patience(ExponentialBackoff(cap=2, base=0.05), retries=REDIS_PATIENCE_S // 2),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
    )
    pool.connection_class = cancellable(pool.connection_class)
    client: Redis = PatientRedis.from_pool(pool)
    return client


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
