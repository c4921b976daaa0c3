"""Asynchronous tasks: groups of them, waits with a limit, and their end within a bounded time."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
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


@asynccontextmanager
async def task_group(*background: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error ends all of it and is raised as it is, not within an ExceptionGroup.

    Args:
        background: Run beside the block, and are cancelled when it ends; tasks that the block adds are waited for.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(coroutine) for coroutine in background]
            yield tasks
            for task in started:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def wait_until_set(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event, `timeout_s` at most; whether it is set."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
