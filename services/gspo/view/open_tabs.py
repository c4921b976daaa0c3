"""The readers' open tabs, as far as the page's server knows them: each browser has a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

# Streams at a time. A browser opens one for all of its tabs where it can.
MAX_STREAMS = 64
_WAITING_VIEWS = 16


class OpenTabs:
    """Hands each opened view to every stream; of one event loop."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[str]] = set()

    @property
    def num_streams(self) -> int:
        """Browsers that listen."""
        return len(self._queues)

    @contextmanager
    def listening(self) -> Iterator[asyncio.Queue[str]]:
        """A queue of the views that are opened during the block, as JSON."""
        queue: asyncio.Queue[str] = asyncio.Queue(_WAITING_VIEWS)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def open(self, view_json: str) -> int:
        """Send a view to every stream; the number of them that took it."""
        num_taken = 0
        for queue in self._queues:
            if not queue.full():
                queue.put_nowait(view_json)
                num_taken += 1
        return num_taken
