"""A relay with many connections at a time: those that it may have are served side by side, and others wait."""

from __future__ import annotations

import asyncio
import resource
import socket
from functools import partial

import pytest

from gspo.agents.agent_pool import connections_each
from gspo.agents.relay import Dial, Relay

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("limit", "num_sandboxes", "num"),
    [(resource.RLIM_INFINITY, 100, 64), (65_536, 100, 64), (1024, 10, 32), (256, 10, 1)],
)
async def test_connections_of_all_sandboxes_leave_descriptors_to_the_service(
    limit: int, num_sandboxes: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (limit, limit))
    assert connections_each(num_sandboxes) == num


async def test_as_many_connections_as_it_may_have_are_served_side_by_side() -> None:
    served = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.release()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        dial: Dial = partial(asyncio.open_connection, "127.0.0.1", port)
        listening = socket.create_server(("127.0.0.1", 0))
        async with Relay(listening, "gateway", dial, asyncio.Semaphore(80)):
            opened = [await asyncio.open_connection(*listening.getsockname()) for _ in range(81)]
            for _ in range(80):
                await served.acquire()
            await asyncio.sleep(0.1)
            assert served.locked(), "the relay has more connections than it may"
            opened[0][1].close()
            await served.acquire()
            for _, writer in opened:
                writer.close()
