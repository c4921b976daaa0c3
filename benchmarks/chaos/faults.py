"""How each kind of strike is done, and undone.

It decides nothing about when or whom (schedule.py) and waits for no recovery."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from redis.exceptions import RedisError

from benchmarks.chaos.schedule import CLOCK_BACK_S, Fault
from benchmarks.chaos.target import RunUnderTest

_APPEAR_S, _PUSH_S = 60.0, 60.0


async def strike(world: RunUnderTest, planned: Fault) -> None:
    """Do it, and return when it is over; what it did may last."""
    verb = planned.kind.partition(" ")[0]
    await _HOW[verb](world, planned)


async def _kill(world: RunUnderTest, planned: Fault) -> None:
    os.kill(await _pid(world, planned.targets[0]), signal.SIGKILL)


async def _stop(world: RunUnderTest, planned: Fault) -> None:
    pid = await _pid(world, planned.targets[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(planned.lasts_s)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def _flush(world: RunUnderTest, planned: Fault) -> None:
    async with asyncio.timeout(_APPEAR_S):
        while True:
            with suppress(RedisError, OSError):
                await world.redis.flushall()
                return
            await asyncio.sleep(0.1)


async def _cut(world: RunUnderTest, planned: Fault) -> None:
    assert world.network is not None
    world.network.cut(*planned.targets)
    try:
        await asyncio.sleep(planned.lasts_s)
    finally:
        world.network.join(*planned.targets)


async def _fill(world: RunUnderTest, planned: Fault) -> None:
    filler = world.disk / "filler"
    deadline = time.monotonic() + planned.lasts_s
    try:
        while time.monotonic() < deadline:
            # Again and again: a service that removes a file of its own makes room.
            with suppress(OSError), filler.open("ab", buffering=0) as file:
                while True:
                    file.write(b"\0" * min(1 << 20, max(1, shutil.disk_usage(world.disk).free)))
            await asyncio.sleep(0.05)
    finally:
        filler.unlink()


async def _corrupt(world: RunUnderTest, planned: Fault) -> None:
    file = world.faults / f"corrupt-{planned.targets[0]}"
    file.touch()
    deadline = time.monotonic() + _PUSH_S
    while file.exists() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    if file.exists():
        raise TimeoutError(f"no frame came to {planned.targets[0]} within {_PUSH_S:g} s")


async def _hang(world: RunUnderTest, planned: Fault) -> None:
    file = world.faults / "hang"
    file.touch()
    try:
        await asyncio.sleep(planned.lasts_s)
    finally:
        file.unlink()


async def _clock(world: RunUnderTest, planned: Fault) -> None:
    file = world.faults / f"clock-{planned.targets[0]}"
    file.write_text(f"{-CLOCK_BACK_S}")
    try:
        await asyncio.sleep(planned.lasts_s)
    finally:
        file.unlink()


async def _pid(world: RunUnderTest, name: str) -> int:
    deadline = time.monotonic() + _APPEAR_S
    while (pid := world.pid(name)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} has no process")
        await asyncio.sleep(0.05)
    return pid


_HOW: dict[str, Callable[[RunUnderTest, Fault], Awaitable[None]]] = {
    "kill": _kill,
    "stop": _stop,
    "flush": _flush,
    "cut": _cut,
    "fill": _fill,
    "corrupt": _corrupt,
    "hang": _hang,
    "clock": _clock,
}
