"""How Ctrl-C ends the checks before a session."""

from __future__ import annotations

import asyncio

import pytest

from gspo.cli.processes.exit_codes import InterruptedRunError, RunError
from gspo.cli.run.session import Interrupts
from gspo.cli.run.training import until_interrupted


async def test_an_interrupt_ends_the_work() -> None:
    interrupts, cancelled = Interrupts(), asyncio.Event()

    async def work() -> None:
        interrupts.requested.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async with asyncio.timeout(30):
        with pytest.raises(InterruptedRunError, match="stopped before anything was started"):
            await until_interrupted(work(), interrupts)
    assert cancelled.is_set()


async def test_work_without_an_interrupt_gives_its_result_or_its_own_error() -> None:
    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise RunError("not ready")

    assert await until_interrupted(asyncio.sleep(0.01, "done"), Interrupts()) == "done"
    with pytest.raises(RunError, match="not ready"):
        await until_interrupted(fails(), Interrupts())
