"""The readiness of a process after its health probe was asked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gspo.cli.monitor.view import Phases, ServiceProcess, View
from gspo.cli.monitor.watcher import Watcher
from gspo.common.config.schema import Config
from gspo.common.streams.instances import Instance, Registration
from gspo.common.streams.keys import Keys
from gspo.common.telemetry.activity import Activity
from tests.conftest import free_port

pytestmark = pytest.mark.asyncio(loop_scope="function")
ACTIVITY = {"kind": "busy", "what": "loading the model", "since_unix_s": 0.0}


async def asked(config: Config, folder: Path, port: int) -> ServiceProcess:
    """A process with that HTTP port, after it was asked once."""
    process = ServiceProcess(
        "learner-0", 0.0, Instance("learner", "learner-0", http=f"127.0.0.1:{port}", activity=ACTIVITY)
    )
    view = View(config, folder, {"learner-0": process}, Phases())
    watcher = Watcher(Redis(), view, lambda _: None)
    async with httpx.AsyncClient(timeout=0.1) as client:
        await watcher._probe_readiness(client, "learner-0")
    return process


async def answered(config: Config, folder: Path, status: int, body: dict[str, Any]) -> ServiceProcess:
    """The same, of a server that answers so."""
    text = json.dumps(body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} -\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        return await asked(config, folder, server.sockets[0].getsockname()[1])


async def test_one_that_imports_or_loads_has_no_problem(config: Config, tmp_path: Path) -> None:
    """Its event loop answers no request meanwhile; its heartbeat names its activity."""

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.0)
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        busy = await asked(config, tmp_path, server.sockets[0].getsockname()[1])
    for process in (busy, await asked(config, tmp_path, free_port())):
        assert (process.ready, process.problem) == (False, "")
        assert process.in_words().startswith("loading the model (for ")


async def test_a_problem_is_shown_and_starting_is_none(config: Config, tmp_path: Path) -> None:
    assert (await answered(config, tmp_path, 200, {})).ready
    starting = await answered(config, tmp_path, 503, {"problems": {"starting": "the service is starting"}})
    assert (starting.ready, starting.problem) == (False, "")
    refused = await answered(config, tmp_path, 503, {"problems": {"starting": "x", "token": "learner refuses us"}})
    assert (refused.ready, refused.problem) == (False, "learner refuses us")


async def test_what_a_service_did_last_is_shown_until_it_is_ready(config: Config, redis: Redis, tmp_path: Path) -> None:
    """vLLM's start holds the heartbeat up for longer than it is remembered."""
    keys = Keys(config.name)
    process = ServiceProcess("generation-0", 0.0)
    view = View(config, tmp_path, {"generation-0": process}, Phases())
    watcher = Watcher(redis, view, lambda _: None)
    activity = Activity("generation")
    activity.set("busy", "starting vLLM")
    registration = Registration(redis, keys, Instance("generation", "generation-0"), activity, dict)
    await registration.beat()
    await watcher._read_instances()
    await redis.flushall()
    await watcher._read_instances()
    assert process.in_words().startswith("starting vLLM (for ")
    process.ready = True
    await watcher._read_instances()
    assert process.instance is None
