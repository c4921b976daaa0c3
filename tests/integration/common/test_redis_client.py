"""A client of a Redis that restarts, and of one that refuses writes."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import Connection

from gspo.cli.processes.redis_server import redis_command
from gspo.common.streams.events import Events
from gspo.common.streams.inbox import Inbox, append
from gspo.common.streams.keys import Keys
from gspo.common.streams.redis_client import connect_redis
from gspo_proto.rollout_pb2 import Event, GroupTask, Prompt, StopRequested
from tests.conftest import free_port
from tests.support.typed.redis_entries import payloads


async def test_a_client_waits_for_a_redis_that_is_started_again(tmp_path: Path) -> None:
    port = free_port()
    command = redis_command("127.0.0.1", port, tmp_path)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = connect_redis(f"redis://127.0.0.1:{port}/0")
    events = Events(client, Keys("test"), "test")
    try:
        await client.ping()
        following = asyncio.ensure_future(anext(events.follow()))
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


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.parametrize(
    ("refuse", "accept"),
    [
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
        # A replica whose primary does not answer: READONLY.
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    ],
)
async def test_a_redis_that_refuses_writes_is_waited_for_and_each_write_is_made_once(
    redis: Redis, keys: Keys, refuse: str, accept: str
) -> None:
    worker = Inbox(redis, keys, keys.prompts, consumer="a", lease_s=30.0)
    task = GroupTask(schema=1, num_rollouts=1, prompt=Prompt(token_ids=[1])).SerializeToString()
    await append(redis, keys.prompts, [task])
    (delivery,) = await worker.take(1, block_s=1)
    execute: Any = redis.execute_command
    await execute(*refuse.split())
    try:
        # A command, a transaction, and a script.
        waiting = [
            asyncio.ensure_future(redis.xadd(keys.rollouts, {"d": "command"})),
            asyncio.create_task(append(redis, keys.rollouts, [b"first", b"second"])),
            asyncio.create_task(worker.finish(delivery, [(keys.rollouts, b"script")])),
        ]
        await asyncio.sleep(1.2)
        assert not [write for write in waiting if write.done()]
        assert await redis.xlen(keys.rollouts) == 0
    finally:
        await execute(*accept.split())
    assert (await asyncio.gather(*waiting))[2] is True
    written = sorted(await payloads(redis, keys.rollouts))
    assert written == [b"command", b"first", b"script", b"second"]


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.timeout(20)
async def test_a_task_that_is_cancelled_as_its_command_has_been_sent_ends(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect_redis(redis_url)
    await client.set("answer", "of before")

    async def asking_for_ever() -> None:
        while True:
            await client.get("answer")
            await asyncio.sleep(0)

    asking = asyncio.create_task(asking_for_ever())
    send = Connection._send_packed_command

    async def sent_and_cancelled(self: Connection, command: Iterable[bytes]) -> None:
        await send(self, command)
        asking.cancel()

    try:
        await asyncio.sleep(0.05)
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "_send_packed_command", sent_and_cancelled)
            await asyncio.wait({asking}, timeout=5.0)
        assert asking.cancelled()
        # An unread answer is not taken for the next one.
        assert await client.set("answer", "of now") is True
        assert await client.get("answer") == b"of now"
    finally:
        await client.aclose()
