"""Whose turn it is: calls of one sandbox wait in a queue, first come first served, for a place at a worker.

There is a place for each worker. A call takes a free one, or a seat at one that calls of its session hold, where the
worker answers so quickly that waiting in its channel costs less than standing still between two calls. Nobody passes
one who came before, so no session starves another.
What it is not: workers; it starts and ends none. Neighbours: sandbox.py takes and leaves places, worker_link.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from services.reward.worker_link import WorkerLink


@dataclass(eq=False)
class Place:
    """What calls of one session hold together; the last of them leaves it free.

    Attributes:
        worker: Who answers; the first of them says so by `Turns.seat`.
    """

    session: str | None
    worker: WorkerLink | None = None
    num_calls: int = 1

    @property
    def is_last(self) -> bool:
        """Whether only one call is left."""
        return self.num_calls == 1


@dataclass(eq=False)
class _Waiting:
    session: str | None
    alone: bool
    place: asyncio.Future[Place]


class Turns:
    """The places at `num_workers` workers."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._places: list[Place] = []
        self._queue: deque[_Waiting] = deque()

    async def take(self, session: str | None, *, alone: bool) -> Place:
        """A place; without a worker where it is new.

        Args:
            session: Only calls of one session sit together; None: with nobody.
            alone: Whether this call sits with no other one.
        """
        if not self._queue and (place := self._find(session, alone=alone)):
            return place
        waiting = _Waiting(session, alone, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        try:
            return await waiting.place
        except asyncio.CancelledError:
            if not waiting.place.cancelled():  # it was its turn already
                self.leave(waiting.place.result())
            elif waiting in self._queue:
                self._queue.remove(waiting)
                self._move_on()
            raise

    def seat(self, place: Place, worker: WorkerLink) -> None:
        """Say who answers at a new place; others may come to it from now on."""
        place.worker = worker
        self._move_on()

    def leave(self, place: Place) -> None:
        """Give a place, or a seat at it, back."""
        place.num_calls -= 1
        if place.num_calls == 0:
            self._places.remove(place)
        self._move_on()

    def _move_on(self) -> None:
        while self._queue:
            first = self._queue[0]
            if not first.place.done():
                place = self._find(first.session, alone=first.alone)
                if place is None:
                    return
                first.place.set_result(place)
            self._queue.popleft()

    def _find(self, session: str | None, *, alone: bool) -> Place | None:
        if len(self._places) < self._num_workers:
            self._places.append(Place(session))
            return self._places[-1]
        if alone or session is None:
            return None
        fitting = [place for place in self._places if place.session == session and _has_seat(place)]
        if not fitting:
            return None
        place = min(fitting, key=lambda one: one.num_calls)
        place.num_calls += 1
        return place


def _has_seat(place: Place) -> bool:
    return place.worker is not None and place.worker.takes_another(place.num_calls)
