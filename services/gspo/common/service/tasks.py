"""Ending asynchronous tasks, also those that swallow a cancellation."""

from __future__ import annotations

import asyncio
import time
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
        log.error("tasks_left", names=sorted(task.get_name() for task in tasks))
