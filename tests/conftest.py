"""For every test: a real Redis of its own, property tests without a clock, and the worker that runs a file."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import settings
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from gspo.cli.processes.redis_server import redis_command
from gspo.common.streams.inbox import create_consumer_groups
from gspo.common.streams.keys import Keys
from gspo.common.streams.redis_client import connect_redis
from tests.support.repository.run_report import RunReport

# An example of a few milliseconds takes 200, hypothesis' own limit, where the machine is busy.
settings.register_profile("few", deadline=None, max_examples=30)
settings.register_profile("many", deadline=None, max_examples=1000)
settings.load_profile("few")


# Not the global one, to which hypothesis gives the same seed in every process.
_DRAW = random.SystemRandom()

# Files of one worker: they look at one run, or ask one engine, which a session fixture makes.
TOGETHER = (
    ("tests/integration/run/test_whole_run.py", "tests/integration/run/test_observed_run.py"),
    tuple(
        f"tests/integration/generation/test_{name}.py"
        for name in ("engine", "sleep", "agents", "gateway", "run_agents")
    ),
)


def pytest_configure(config: pytest.Config) -> None:
    """Count what the run costs, and report it at its end."""
    config.pluginmanager.register(RunReport(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests go to one worker together: those of a file, since they share fixtures, and those of TOGETHER."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return next((files[0] for files in TOGETHER if file in files), file)

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """A test that logs half of a surrogate pair would end its worker, which sends reports as UTF-8."""
    report = yield
    return json.loads(json.dumps(report, ensure_ascii=False).encode(errors="replace"))


@pytest.fixture(scope="module", autouse=True)
def _own_linear() -> Iterator[None]:
    """DeepSpeed replaces torch's `linear` for good where it spreads weights; the next module gets torch's own."""
    yield
    if "torch" in sys.modules:
        import torch

        torch.nn.functional.linear = torch._C._nn.linear


def free_port() -> int:
    """A TCP port that nobody listens on, outside the range from which the system gives ports to others."""
    while True:
        port = _DRAW.randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A redis-server for the whole session."""
    folder: Path = tmp_path_factory.mktemp("redis")
    port = free_port()
    process = subprocess.Popen(redis_command("127.0.0.1", port, folder), stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        _wait_until_up(url)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=10)


@retry(
    retry=retry_if_exception_type(RedisConnectionError), stop=stop_after_delay(10), wait=wait_fixed(0.05), reraise=True
)
def _wait_until_up(url: str) -> None:
    BlockingRedis.from_url(url).ping()


@pytest_asyncio.fixture(loop_scope="function")
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """An empty Redis."""
    client = connect_redis(redis_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest_asyncio.fixture(loop_scope="function")
async def keys(redis: Redis) -> Keys:
    """Keys of a run whose streams exist."""
    keys = Keys("test")
    await create_consumer_groups(redis, keys)
    return keys
