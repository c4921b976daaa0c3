"""The beginning and the end of each kind of fault.

schedule.py decides when a fault comes and for which process; target.py sees when the run has recovered.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from redis.exceptions import RedisError

from benchmarks.chaos.harness.disk import freeze, thaw
from benchmarks.chaos.schedule import CLOCK_MOVES_S, Fault
from benchmarks.chaos.target import RunUnderTest

_APPEAR_S, _PUSH_S = 60.0, 60.0
_CLOSE_EVERY_S = 0.05
T = TypeVar("T")


async def strike(world: RunUnderTest, planned: Fault) -> None:
    """Inject a fault, and return when it is over; its effects may last.

    Raises:
        TimeoutError: It found nothing to strike.
    """
    async with asynccontextmanager(_FAULTS[planned.verb])(world, planned):
        await asyncio.sleep(planned.lasts_s)


async def _kill(world: RunUnderTest, planned: Fault) -> AsyncIterator[None]:
    os.kill(await _pid(world, planned), signal.SIGKILL)
    yield


async def _stop(world: RunUnderTest, planned: Fault) -> AsyncIterator[None]:
    name = planned.targets[0]
    pids = await _until(lambda: world.pids(name), f"{name} has no process", _APPEAR_S)
    stopped: list[int] = []
    try:
        # A process that was stopped last may have started another one before.
        while new := [pid for pid in pids if pid not in stopped]:
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped += new
            pids = world.pids(name) or []
        yield
    finally:
        for pid in reversed(stopped):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def _flush(world: RunUnderTest, planned: Fault) -> AsyncIterator[None]:
    async with asyncio.timeout(_APPEAR_S):
        while True:
            with suppress(RedisError, OSError):
                await world.redis.flushall()
                break
            await asyncio.sleep(0.1)
    yield


async def _cut(world: RunUnderTest, planned: Fault) -> AsyncIterator[None]:
    assert world.network is not None
    world.network.cut(*planned.targets)
    try:
        yield
    finally:
        world.network.join(*planned.targets)


async def _fill(world: RunUnderTest, planned: Fault) -> AsyncIterator[None]:
    filler = world.disk / "filler"
    filling = asyncio.create_task(_keep_full(filler))
    try:
        yield
    finally:
        filling.cancel()
        filler.unlink()


async def _keep_full(filler: Path) -> None:
    """Fill the disk again and again: a service that removes a file of its own frees space."""
    while True:
        with suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(b"\0" * min(1 << 20, max(1, shutil.disk_usage(filler.parent).free)))
        await asyncio.sleep(0.05)


async def _slow(world: RunUnderTest, planned: Fault) -> AsyncIterator[None]:
    await asyncio.to_thread(freeze, world.disk)
    try:
        yield
    finally:
        await asyncio.to_thread(thaw, world.disk)


async def _close(world: RunUnderTest, planned: Fault) -> AsyncIterator[None]:
    """Let Redis close every connection of a service, again and again: some are in the middle of a reply."""
    name, num_closed, is_over = planned.targets[0], 0, False

    async def keep_closing() -> None:
        nonlocal num_closed
        while not is_over:
            with suppress(RedisError, OSError):
                for client in await world.redis.client_list():
                    if client["addr"].rpartition(":")[0] == world.redis_source(name):
                        num_closed += await world.redis.client_kill_filter(_id=client["id"])
            await asyncio.sleep(_CLOSE_EVERY_S)

    # Not cancelled: the client can forget that (python/cpython#86296).
    closing = asyncio.create_task(keep_closing())
    try:
        yield
    finally:
        is_over = True
        await closing
    if not num_closed:
        raise TimeoutError(f"{name} had no connection to Redis")


async def _drop(world: RunUnderTest, planned: Fault) -> AsyncIterator[None]:
    file = world.fault_file(planned)
    file.write_text("")
    try:
        yield
    finally:
        is_unread = not file.read_text()
        file.unlink()
    if is_unread:
        raise TimeoutError(f"no reply to {planned.targets[0]} was lost")


async def _place_file(world: RunUnderTest, planned: Fault) -> AsyncIterator[None]:
    """The fault of faulty_service.py or of the reward function that lasts while its file is there."""
    file = world.fault_file(planned)
    file.write_text(f"{CLOCK_MOVES_S[planned.kind]}" if planned.verb == "clock" else "")
    try:
        yield
    finally:
        file.unlink()


async def _corrupt(world: RunUnderTest, planned: Fault) -> AsyncIterator[None]:
    file = world.fault_file(planned)
    file.touch()
    await _until(lambda: not file.exists() or None, f"no frame came to {planned.targets[0]}", _PUSH_S)
    yield


async def _pid(world: RunUnderTest, planned: Fault) -> int:
    name = planned.targets[0]
    return await _until(lambda: world.pid(name), f"{name} has no process", _APPEAR_S)


async def _until(value: Callable[[], T | None], problem: str, timeout_s: float) -> T:
    """The first value that is not None."""
    deadline = time.monotonic() + timeout_s
    while (result := value()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{problem} within {timeout_s:g} s")
        await asyncio.sleep(0.05)
    return result


_FAULTS: dict[str, Callable[[RunUnderTest, Fault], AsyncIterator[None]]] = {
    "kill": _kill,
    "stop": _stop,
    "flush": _flush,
    "cut": _cut,
    "fill": _fill,
    "corrupt": _corrupt,
    "slow": _slow,
    "close": _close,
    "drop": _drop,
    "hang": _place_file,
    "clock": _place_file,
}
