"""Commands reach a supervisor in sequence, also if it reads none for long."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import Any

import pytest

from gspo.reward.sandbox.supervisor_link import SupervisorLink

pytestmark = pytest.mark.asyncio(loop_scope="function")
MANY = 2000


async def test_commands_to_a_busy_supervisor_are_kept() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    link = SupervisorLink(process=None, control=here)  # type: ignore[arg-type]
    for number in range(MANY):
        link.resume(number)
    read_end, write_end = os.pipe()
    link._send({"op": "start", "id": MANY}, read_end)
    os.close(read_end)
    there.setblocking(False)
    commands: list[Any] = []
    while len(commands) <= MANY:
        await asyncio.sleep(0)
        try:
            data, descriptors, _, _ = socket.recv_fds(there, 65536, 2)
        except BlockingIOError:
            continue
        commands.append((json.loads(data)["id"], len(descriptors)))
    assert commands == [(number, 0) for number in range(MANY)] + [(MANY, 1)]
    os.write(write_end, b"x")
    assert os.read(descriptors[0], 1) == b"x"
    there.close()
    async with asyncio.timeout(5):
        while link.alive:
            await asyncio.sleep(0.001)
    for fd in (write_end, *descriptors):
        os.close(fd)
