"""Finished rollouts go out in bursts: what finishes while one write is under way goes with the next.

Rollouts of one engine step end together, and a round trip for each would cost more than their sampling.
Neighbour: worker.py puts them in and learns whether its lease still held.
"""

from __future__ import annotations

import asyncio

from gspo.common.streams.inbox import EntryOutput, Inbox


class Outbox:
    """Writes the outputs of one inbox's entries."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._waiting: list[tuple[EntryOutput, asyncio.Future[bool]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def put(self, output: EntryOutput) -> bool:
        """Write one output; whether its entry is still ours."""
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((output, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return await written

    async def _write(self) -> None:
        while self._waiting:
            burst, self._waiting = self._waiting, []
            try:
                kept = await self._inbox.put([output for output, _ in burst])
            except Exception as error:  # noqa: BLE001 - whoever waits gets it, and ends the worker by it
                for _, written in burst:
                    if not written.done():
                        written.set_exception(error)
                continue
            for (_, written), ours in zip(burst, kept, strict=True):
                if not written.done():
                    written.set_result(ours)
