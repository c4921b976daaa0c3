"""A link between two ends, over real gloo: bytes go, a stranger does not get in, and nobody waits for ever.

What it is not: NCCL, which needs a GPU at each end. Neighbour: tests/integration/test_push_direct.py pushes over it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from services.common import direct
from services.common.direct import DirectError, Link, Meeting, device_id, own_address, unavailable
from tests.service_process import answers

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]
HOST = "127.0.0.1"


def link(timeout_s: float = 20.0) -> Link:
    return Link("gloo", timeout_s)


@asynccontextmanager
async def linked(timeout_s: float = 20.0) -> AsyncIterator[tuple[Link, Link]]:
    """(listening end, joining end), which have met."""
    ends = link(timeout_s), link(timeout_s)
    meeting = ends[0].listen(HOST)
    await asyncio.gather(ends[0].accept(meeting), ends[1].join(HOST, meeting))
    assert ends[0].name == ends[1].name == meeting.name
    yield ends
    for end in ends:
        end.close()


def random_bytes(num: int) -> np.ndarray:
    return np.frombuffer(bytearray(os.urandom(num)), np.uint8)


async def test_what_is_sent_arrives_again_and_again() -> None:
    async with linked() as (generator, learner):
        for num in (1, 1000, 3 * 2**20 + 1, 5):
            sent, came = random_bytes(num), np.zeros(num, np.uint8)
            await asyncio.gather(learner.send(sent), generator.receive(came))
            assert (sent == came).all()


async def test_several_links_of_one_process_do_not_meet_each_other() -> None:
    async with linked() as one, linked() as other:
        sent, came = [random_bytes(1000) for _ in range(2)], [np.zeros(1000, np.uint8) for _ in range(2)]
        for (generator, learner), out, into in zip((one, other), sent, came, strict=True):
            await asyncio.gather(learner.send(out), generator.receive(into))
        assert (sent[0] == came[0]).all() and (sent[1] == came[1]).all()


async def test_one_who_does_not_know_the_key_finds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_MEETING_TIME", direct.timedelta(seconds=0.5))
    listening, stranger = link(), link()
    meeting = listening.listen(HOST)
    accepting = asyncio.create_task(listening.accept(meeting))
    with pytest.raises(DirectError):
        await stranger.join(HOST, Meeting(meeting.port, "guessed"))
    assert not accepting.done()
    accepting.cancel()


async def test_one_who_finds_the_place_and_not_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names in a store can be listed by whoever reaches its port."""
    listening, stranger = link(), link()
    meeting = listening.listen(HOST)
    real = direct.proof
    monkeypatch.setattr(direct, "proof", lambda key, of: real("listed" if of == "store" else key, of))
    met = await asyncio.gather(
        listening.accept(meeting), stranger.join(HOST, Meeting(meeting.port, "guessed")), return_exceptions=True
    )
    assert all(isinstance(one, DirectError) for one in met)
    assert "stranger" in str(met[1])
    assert not listening.name and not stranger.name


@pytest.mark.parametrize("first", ["send", "receive"])
async def test_who_closes_an_end_wakes_who_waits_there(first: str) -> None:
    """gloo does not always tell a sender that its receiver has gone: then the sender's own end is to be closed."""
    async with linked() as (generator, learner):
        big = np.zeros(2**28, np.uint8)  # more than any socket holds
        works = {"send": (learner, learner.send), "receive": (generator, generator.receive)}
        for end, work in (works.pop(first), *works.values()):
            waiting = asyncio.create_task(work(big))
            await asyncio.wait({waiting}, timeout=0.3)
            began = time.monotonic()
            end.close()
            with pytest.raises(DirectError):
                await waiting
            assert time.monotonic() - began < 5.0


async def test_who_is_cancelled_leaves_nobody_writing() -> None:
    async with linked() as (generator, learner):
        into = np.zeros(2**20, np.uint8)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await generator.receive(into)
        assert time.monotonic() - began < 5.0
        assert not generator.name
        with pytest.raises(DirectError):
            await learner.send(np.ones(2**20, np.uint8))
            await learner.send(np.ones(2**26, np.uint8))
        assert not into.any()


async def test_a_transfer_that_takes_too_long_is_given_up() -> None:
    async with linked(timeout_s=0.3) as (generator, _):
        with pytest.raises(DirectError, match="Timed out"):
            await generator.receive(np.zeros(10, np.uint8))
        with pytest.raises(DirectError, match="was closed"):
            await generator.receive(np.zeros(10, np.uint8))


async def test_where_nobody_listens_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_MEETING_TIME", direct.timedelta(seconds=0.5))
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(DirectError):
        await link().join(HOST, Meeting(port, "key"))


async def test_it_listens_at_its_address_alone_and_not_once_it_is_closed() -> None:
    listening = link()
    meeting = listening.listen(HOST)
    assert answers(HOST, meeting.port)
    assert not answers("127.0.0.2", meeting.port)
    listening.close()
    async with asyncio.timeout(10.0):
        while answers(HOST, meeting.port):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("text", ["", "12", "x key", "-1 key"])
async def test_what_is_no_meeting_is_refused(text: str) -> None:
    with pytest.raises(DirectError, match="gspo-direct"):
        Meeting.parse(text)


async def test_a_meeting_is_told_as_text() -> None:
    assert Meeting.parse(str(Meeting(4000, "key"))) == Meeting(4000, "key")
    assert "key" not in Meeting(4000, "key").name


async def test_a_machine_without_a_gpu_takes_no_nccl() -> None:
    assert unavailable("gloo") == ""
    assert "sees none" in unavailable("nccl")
    assert "'smoke' is none of" in unavailable("smoke")
    assert device_id("gloo") == ""
    assert own_address("127.0.0.1") == "127.0.0.1"
