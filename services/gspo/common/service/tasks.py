"""Ending asynchronous tasks within a bounded time, also those that swallow a cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import structlog

CANCEL_PATIENCE_S = 5.0
log = structlog.get_logger()


async def end_tasks(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they are done, CANCEL_PATIENCE_S at most: a client that reads can swallow a cancellation."""
    deadline = time.monotonic() + CANCEL_PATIENCE_S
    while tasks and time.monotonic() < deadline:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=0.5)
    if tasks:
        log.error("tasks_not_ended", names=sorted(task.get_name() for task in tasks))


async def run_until_cancelled(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run work so that a cancellation always ends this, CANCEL_PATIENCE_S later at most.

    A TaskGroup cancels its tasks once, waits for them without a deadline, and ignores one that cancels itself.

    Raises:
        RuntimeError: The work was cancelled, and this was not.
    """
    task = asyncio.create_task(work(), name=name)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        ending = asyncio.create_task(end_tasks({task}), name=f"end of {name}")
        while not ending.done():  # a further cancellation must not leave the work behind
            with suppress(asyncio.CancelledError):
                await asyncio.wait({ending})
        raise
    if task.cancelled():
        raise RuntimeError(f"{name} was cancelled from within")
    task.result()


async def cancel_all(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel tasks of `run_until_cancelled` and wait for their end, which that bounds."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a TaskGroup, out of every group around it."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
