"""Calls of Ray in threads that no end of this process waits for: most of them wait for the head of the cluster."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> Future[T]:
    """The result of a call."""
    result = Future[T]()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that takes the result
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


async def called(call: Callable[[], T]) -> T:
    """The result of a call, which the loop does not wait for."""
    return await asyncio.wrap_future(in_thread(call))
