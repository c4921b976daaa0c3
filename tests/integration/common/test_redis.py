"""A Redis that dies and comes back under a client."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

from gspo_proto.rollout_pb2 import Event, StopRequested
from services.common.events import Events
from services.common.keys import Keys
from services.common.redis_server import redis_command
from services.common.runtime import connect_redis
from tests.conftest import free_port


async def test_a_client_waits_for_a_redis_that_is_started_again(tmp_path: Path) -> None:
    port = free_port()
    command = redis_command("127.0.0.1", port, tmp_path)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = connect_redis(f"redis://127.0.0.1:{port}/0")
    events = Events(client, Keys("test"), "test")
    try:
        await client.ping()
        following = asyncio.create_task(anext(events.follow()))
        await asyncio.sleep(0.3)
        server.kill()
        server.wait(10)
        sending = asyncio.create_task(events.send(Event(stop_requested=StopRequested(reason="enough"))))
        await asyncio.sleep(0.3)
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        await asyncio.wait_for(sending, 20)
        assert (await asyncio.wait_for(following, 20)).stop_requested.reason == "enough"
    finally:
        server.kill()
        server.wait(10)
        await client.aclose()
