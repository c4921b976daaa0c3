"""Who comes to which worker: first come first served, and those of one session together where it is quick."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.reward.turns import Place, Turns

pytestmark = pytest.mark.asyncio(loop_scope="function")


class Quick:
    """A worker that takes so many calls at once."""

    def __init__(self, num_seats: int = 3) -> None:
        self._num_seats = num_seats

    def takes_another(self, num_calls: int) -> bool:
        return num_calls < self._num_seats


def seated(turns: Turns, place: Place, worker: Any) -> Place:
    turns.seat(place, worker)
    return place


async def tried(turns: Turns, session: str | None, *, alone: bool = False) -> asyncio.Task[Place]:
    task = asyncio.create_task(turns.take(session, alone=alone))
    await asyncio.sleep(0)
    return task


async def test_a_free_worker_first_then_a_seat_beside_calls_of_the_same_session() -> None:
    turns = Turns(2)
    first = seated(turns, await turns.take("a", alone=False), Quick())
    second = seated(turns, await turns.take("a", alone=False), Quick())
    assert first is not second
    seats = [await turns.take("a", alone=False) for _ in range(4)]
    assert (seats.count(first), seats.count(second)) == (2, 2)
    assert not (await tried(turns, "a")).done()


async def test_those_who_wait_sit_down_as_soon_as_there_is_a_worker() -> None:
    turns = Turns(1)
    place = await turns.take("a", alone=False)
    waiting = [await tried(turns, "a") for _ in range(3)]
    seated(turns, place, Quick())
    assert [await waiting[0], await waiting[1]] == [place, place]
    assert not waiting[2].done()


@pytest.mark.parametrize("session", ["b", None])
async def test_others_wait_until_a_worker_is_left_by_all(session: str | None) -> None:
    turns = Turns(1)
    place = seated(turns, await turns.take("a", alone=False), Quick())
    assert await turns.take("a", alone=False) is place
    other = await tried(turns, session)
    turns.leave(place)
    await asyncio.sleep(0)
    assert not other.done()
    turns.leave(place)
    assert (await other).worker is None


async def test_nobody_passes_one_who_came_before() -> None:
    turns = Turns(1)
    place = seated(turns, await turns.take("a", alone=False), Quick())
    other, late = await tried(turns, "b"), await tried(turns, "a")
    assert not late.done(), "there is a seat, and another session waits"
    turns.leave(place)
    await other
    await asyncio.sleep(0)
    assert not late.done()


async def test_where_there_is_no_worker_yet_or_a_slow_one_nobody_sits_down() -> None:
    turns = Turns(1)
    place = await turns.take("a", alone=False)
    waiting = await tried(turns, "a")
    assert not waiting.done()
    seated(turns, place, Quick(0))
    assert not (await tried(turns, "a")).done()


async def test_a_call_alone_takes_no_seat() -> None:
    turns = Turns(1)
    place = seated(turns, await turns.take("a", alone=True), Quick())
    alone = await tried(turns, "a", alone=True)
    assert not alone.done()
    turns.leave(place)
    assert (await alone) is not place


async def test_one_that_is_given_up_leaves_its_turn_to_the_next() -> None:
    turns = Turns(1)
    place = await turns.take("a", alone=False)
    given_up, next_one, last = [await tried(turns, "b") for _ in range(3)]
    given_up.cancel()
    turns.leave(place)
    next_one.cancel()  # it has its turn already, and does not know
    assert await asyncio.wait_for(last, 5)
    assert isinstance((await asyncio.gather(given_up, next_one, return_exceptions=True))[1], asyncio.CancelledError)
