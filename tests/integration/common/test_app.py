"""The application skeleton on a real Redis: the order of startup and shutdown, and the error that ends the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from gspo.cli.processes.redis_server import redis_command
from gspo.common import tasks
from gspo.common.config.schema import Config
from gspo.common.errors import EXIT_BAD_INPUT, EXIT_FAILED, InputError
from gspo.common.network.grpc_server import GrpcApi
from gspo.common.network.http_server import Receive, Scope, Send, reply
from gspo.common.service.app import App, Service, run_app
from gspo.common.service.failure import ProcessFailure
from gspo.common.service.options import Options
from gspo.common.streams.events import Events
from gspo.common.streams.instances import Instance, list_instances
from gspo_proto.rollout_pb2 import RUN_END_COMPLETED, Event, Finished
from tests.conftest import free_port
from tests.support.service_process import answers, log_events, make_run

pytestmark = pytest.mark.timeout(60)

NO_CALLS = GrpcApi("gspo.Test", lambda _server: None)


class Observer:
    """A service that looks at itself from outside, with a client of its own."""

    def __init__(self, config: Config, redis_url: str, redis: Redis) -> None:
        self.port = free_port()
        self.service = Service(
            Options("reward", config.run_dir, redis_url, "test", "127.0.0.1", self.port, 0, False, config)
        )
        self._redis = redis
        self.seen: dict[str, tuple[int, str]] = {}

    async def instance(self) -> Instance | None:
        """The service as others find it; None where it is not registered."""
        instances = await list_instances(self._redis, self.service.keys, "reward")
        return instances[0] if instances else None

    async def status(self, path: str) -> int:
        """HTTP status of a path."""
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{self.port}{path}")).status_code

    async def look(self, moment: str) -> None:
        """Note the status of /readyz, and whether others find the service: not at all, or with a gRPC address."""
        instance = await self.instance()
        found = "absent" if instance is None else "callable" if instance.grpc else "starting"
        self.seen[moment] = await self.status("/readyz"), found


@pytest.fixture
async def observer(tmp_path: Path, redis_url: str, redis: Redis) -> Observer:
    return Observer(make_run(tmp_path, tmp_path), redis_url, redis)


@pytest.mark.asyncio(loop_scope="function")
async def test_startup_and_shutdown_keep_their_order(observer: Observer) -> None:
    @asynccontextmanager
    async def claim() -> AsyncIterator[None]:
        await observer.look("claim")
        yield
        await observer.look("claim left")

    @asynccontextmanager
    async def startup(_service: Service) -> AsyncIterator[App]:
        while await observer.instance() is None:
            await asyncio.sleep(0.01)
        await observer.look("startup")
        yield App(main, {"background": background}, grpc=NO_CALLS)
        await observer.look("startup left")

    async def main() -> None:
        await observer.look("main")

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await observer.look("background left")

    await run_app(observer.service, startup, claim=claim)
    assert list(observer.seen.items()) == [
        ("claim", (503, "absent")),
        ("startup", (503, "starting")),
        ("main", (200, "callable")),
        ("background left", (200, "callable")),
        ("startup left", (200, "absent")),
        ("claim left", (200, "absent")),
    ]
    assert not answers("127.0.0.1", observer.port)


@pytest.mark.asyncio(loop_scope="function")
async def test_the_http_api_answers_from_the_moment_the_startup_sets_it(observer: Observer) -> None:
    statuses: list[int] = []

    async def api(_scope: Scope, _receive: Receive, send: Send) -> None:
        await reply(send, 200, {})

    @asynccontextmanager
    async def startup(service: Service) -> AsyncIterator[App]:
        statuses.append(await observer.status("/v1/state"))
        service.http_api = api
        statuses.append(await observer.status("/v1/state"))
        yield App(lambda: asyncio.sleep(0))

    await run_app(observer.service, startup)
    assert statuses == [503, 200]


@pytest.mark.parametrize("where", ["startup", "main", "background"])
@pytest.mark.asyncio(loop_scope="function")
async def test_an_error_ends_everything_and_is_raised_as_it_is(observer: Observer, where: str) -> None:
    ended: list[str] = []

    async def fail_or_wait(name: str) -> None:
        if name == where:
            raise InputError("key", "does not hold", "Mend it")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    @asynccontextmanager
    async def startup(_service: Service) -> AsyncIterator[App]:
        if where == "startup":
            await fail_or_wait("startup")
        try:
            yield App(lambda: fail_or_wait("main"), {"background": lambda: fail_or_wait("background")})
        finally:
            ended.append("startup")

    with pytest.raises(InputError, match="key: does not hold"):
        await run_app(observer.service, startup)
    assert sorted([*ended, where]) == (["startup"] if where == "startup" else ["background", "main", "startup"])
    assert await observer.instance() is None
    assert not answers("127.0.0.1", observer.port)


@pytest.mark.asyncio(loop_scope="function")
async def test_the_end_of_the_run_drains_and_one_from_before_does_not(observer: Observer) -> None:
    service = observer.service
    finished = Event(finished=Finished(reason="done", end=RUN_END_COMPLETED))
    events = Events(service.redis, service.keys, "test")
    await events.send(finished)
    drained: list[bool] = []

    @asynccontextmanager
    async def startup(_service: Service) -> AsyncIterator[App]:
        yield App(main)

    async def main() -> None:
        await asyncio.sleep(0.3)
        drained.append(service.stopping.is_set())
        await events.send(finished)
        await service.stopping.wait()

    await run_app(service, startup, ends_with_run=True)
    assert drained == [False]


@pytest.mark.asyncio(loop_scope="function")
async def test_a_task_that_swallows_cancellations_delays_the_shutdown_for_a_bounded_time(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "CANCEL_PATIENCE_S", 1.0)
    released, swallowed = asyncio.Event(), 0

    async def stubborn() -> None:
        nonlocal swallowed
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                swallowed += 1

    @asynccontextmanager
    async def startup(_service: Service) -> AsyncIterator[App]:
        yield App(lambda: asyncio.sleep(0.1), {"stubborn": stubborn})

    try:
        async with asyncio.timeout(10):
            await run_app(observer.service, startup)
        assert swallowed > 1
    finally:
        released.set()


@pytest.mark.asyncio(loop_scope="function")
async def test_a_task_that_cancels_itself_is_an_error(observer: Observer) -> None:
    @asynccontextmanager
    async def startup(_service: Service) -> AsyncIterator[App]:
        yield App(asyncio.Event().wait, {"cancelled": cancelled})  # type: ignore[arg-type]

    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled was cancelled from within"):
        await run_app(observer.service, startup)


PROGRAM = """
import asyncio
from contextlib import asynccontextmanager
from gspo.common.errors import InputError
from gspo.common.service.app import App, run_app, run_process
from gspo.common.service.options import parse_options

async def fail():
    raise ERROR

@asynccontextmanager
async def startup(service):
    yield App(service.stopping.wait, {"failing": fail})

options = parse_options("reward", lambda config: None, meaning="")
run_process(options, lambda service: run_app(service, startup))
"""


def exit_code(config: Config, redis_url: str, error: str, log: Path) -> int:
    """The exit code of a service process of which a background task raises this."""
    command = [sys.executable, "-c", PROGRAM.replace("ERROR", error)]
    options = ["--run-dir", str(config.run_dir), "--redis-url", redis_url]
    with log.open("wb") as output:
        return subprocess.run([*command, *options], stdout=output, stderr=output, timeout=60, check=False).returncode


@pytest.mark.parametrize(
    ("error", "code", "event"),
    [
        ('InputError("key", "does not hold", "Mend it")', EXIT_BAD_INPUT, "bad_input"),
        ('ValueError("a fault of ours")', EXIT_FAILED, "service_failed"),
    ],
)
def test_the_error_of_a_background_task_sets_the_exit_code(
    tmp_path: Path, redis_url: str, error: str, code: int, event: str
) -> None:
    assert exit_code(make_run(tmp_path, tmp_path), redis_url, error, tmp_path / "log") == code
    (line,) = [line for line in log_events(tmp_path / "log") if line["level"] == "error"]
    assert line["event"] == event
    failure = ProcessFailure.from_log(line)
    assert (failure.kind, failure.is_outside, failure.step) == (error.partition("(")[0], False, None)
    assert failure.place.startswith("<string>:")


def test_a_redis_that_takes_no_password_of_ours_is_bad_input(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    server = subprocess.Popen([*redis_command("127.0.0.1", port, tmp_path), "--requirepass", "of-another-run"])
    try:
        while not answers("127.0.0.1", port):
            assert server.poll() is None
        config = make_run(tmp_path, tmp_path)
        assert exit_code(config, f"redis://127.0.0.1:{port}/0", "None", log) == EXIT_BAD_INPUT
    finally:
        server.kill()
        server.wait(10)
    assert "services.redis_password_file" in log_events(log)[-1]["reason"]
