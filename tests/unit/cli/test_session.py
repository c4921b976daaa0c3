"""How a session ends its own tasks."""

from __future__ import annotations

import asyncio

import pytest

from gspo.cli.processes.exit_codes import RunError
from gspo.cli.run.session import first_of


async def test_a_task_that_swallows_a_cancellation_does_not_hold_up_the_end() -> None:
    """A Redis client that is cancelled while its read times out goes on reading."""
    swallowed = 0

    async def reads_for_ever() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed > 1:
                    raise

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise RunError("not ready")

    async with asyncio.timeout(30):
        with pytest.raises(RunError, match="not ready"):
            await first_of([reads_for_ever()], [fails()])
    assert swallowed == 2
