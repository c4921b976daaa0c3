"""The direct road of a weight push: bytes between two processes by torch.distributed, over gloo or NCCL.

A link is a group of two that no other group of either process knows of. Who listens and the key that proves each end
to the other are told over the call, which alone is authenticated: the road itself is neither that nor encrypted. The
one file of this room that knows torch, imported when a link is made. What it is not: it knows no weights and no push.
Neighbours: the learner's and the generation service's direct_road.py, each one end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Bytes = NDArray[np.uint8]
# Initial metadata of an admitted push: where the generator listens, where the two have no link yet.
MEETING = "gspo-direct"
# Both ends are there: to find each other takes milliseconds.
_MEET_S = 10.0
_LOOK_S = 0.005
# Longest that the thread of a closed link is waited for.
_END_S = 2.0
_PEER = "learner"
# Of gloo: nothing comes under this tag. A wait that runs out closes the pair, and so ends every other wait for it.
_TAG, _TAG_OF_NOTHING = 0, 1
_LISTENING, _JOINING = 0, 1


class DirectError(Exception):
    """The direct road is closed, or broke; the message says where."""


@dataclass(frozen=True)
class Meeting:
    """Where a generator waits for the other end of a link, and the key that both prove to know."""

    port: int
    key: str

    def __str__(self) -> str:
        return f"{self.port} {self.key}"

    @classmethod
    def parse(cls, text: str) -> Meeting:
        """What `str` wrote.

        Raises:
            DirectError: It is something else.
        """
        port, _, key = text.partition(" ")
        if not port.isdecimal() or not key:
            raise DirectError(f"{MEETING}: {text!r} is no port and key")
        return cls(int(port), key)

    @property
    def name(self) -> str:
        """Which link comes of it; it does not give the key away."""
        return proof(self.key, "name").hex()[:16]


class Link:
    """One end of a link. One transfer at a time, each in a thread; after any failure it is closed.

    Args:
        transport: "gloo" or "nccl".
        timeout_s: Longest that one transfer may take; whoever waits for less cancels, or closes.

    """

    def __init__(self, transport: str, timeout_s: float) -> None:
        self._transport, self._timeout = transport, timedelta(seconds=timeout_s)
        self._device = "cuda:0" if transport == "nccl" else "cpu"
        self._store: Store | None = None
        self._group: Any = None
        self._peer, self._running = 0, Future[None]()
        self._over = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._closed, self._name = False, ""

    @property
    def name(self) -> str:
        """Which link it is; empty before the two have met, and once it is closed."""
        return "" if self._closed else self._name

    def listen(self, host: str) -> Meeting:
        """Wait for the other end on a port of the system's choice at `host`.

        Raises:
            DirectError: There is no listening there.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, 0), family=family)
            port = listening.getsockname()[1]
            # One that is given a socket listens there alone, and not on every interface.
            self._store = TCPStore(
                host, port, 2, True, _MEETING_TIME, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        except (RuntimeError, OSError) as error:
            raise DirectError(f"cannot listen at {host}: {_first_sentence(error)}") from error
        return Meeting(port, secrets.token_hex(16))

    async def accept(self, meeting: Meeting) -> None:
        """Become one with whoever joins and proves to know the key. It waits as long as nobody comes: cancel it.

        Raises:
            DirectError: Somebody else came, or the road broke.
        """
        named = _named(self._store, meeting)
        while not named.check([_PEER]):
            await asyncio.sleep(_LOOK_S)
        await self._in_thread(lambda: self._meet(named, meeting, own_address(named.get(_PEER).decode()), _LISTENING))

    async def join(self, host: str, meeting: Meeting) -> None:
        """Become one with who listens at `host`.

        Raises:
            DirectError: Nobody is there who knows the key, or the road broke.
        """

        def joined() -> None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            self._store = store = TCPStore(host, meeting.port, 2, False, _MEETING_TIME, wait_for_workers=False)
            own, named = own_address(host), _named(store, meeting)
            named.set(_PEER, own)
            self._meet(named, meeting, own, _JOINING)

        await self._in_thread(joined)

    async def send(self, data: Bytes) -> None:
        """Send bytes; they may be changed once it has returned.

        Raises:
            DirectError: The road broke, or this end was closed.
        """
        await self._in_thread(lambda: self._send(data))

    async def receive(self, into: Bytes) -> None:
        """Fill `into` with as many bytes as it has; nothing writes there once it has returned or raised.

        Raises:
            DirectError: The road broke, or this end was closed.
        """
        await self._in_thread(lambda: self._receive(into))

    def close(self) -> None:
        """End the transfer under way, which then raises, and the link. It may be called again."""
        if not self._closed:
            self._closed = True
            if self._running.running():
                self._loop.call_later(_END_S, self._over.set)
            threading.Thread(target=self._break, name="direct-close", daemon=True).start()

    def _meet(self, store: Store, meeting: Meeting, host: str, rank: int) -> None:
        """Make the group, and have each end prove to the other that it was told the key."""
        self._peer = 1 - rank
        self._group = _group(self._transport, store, rank, host, self._timeout)
        theirs = np.zeros(hashlib.sha256().digest_size, np.uint8)
        # The generator shows its proof first: the learner sends nothing to a stranger.
        if rank == _LISTENING:
            self._send(np.frombuffer(bytearray(proof(meeting.key, "generator")), np.uint8))
            self._receive(theirs)
        else:
            self._receive(theirs)
            self._send(np.frombuffer(bytearray(proof(meeting.key, "learner")), np.uint8))
        if not hmac.compare_digest(theirs.tobytes(), proof(meeting.key, "learner" if self._peer else "generator")):
            raise DirectError("a stranger has joined: its proof is of another key")
        self._name = meeting.name

    def _send(self, data: Bytes) -> None:
        import torch

        self._group.send([torch.from_numpy(data).to(self._device)], self._peer, _TAG).wait(self._timeout)

    def _receive(self, into: Bytes) -> None:
        import torch

        place = torch.from_numpy(into)
        # gloo writes to where they belong; NCCL only to memory of the GPU.
        buffer = place if self._device == "cpu" else torch.empty_like(place, device=self._device)
        self._group.recv([buffer], self._peer, _TAG).wait(self._timeout)
        if buffer is not place:
            place.copy_(buffer)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """Work that blocks. Whoever is cancelled waits for its end, which closing brings about.

        But for one case: gloo may never tell a sender that its receiver had gone before. That thread only reads, and
        is left to its own timeout.
        """
        if self._closed:
            raise DirectError(f"{self._transport}: the link was closed")
        self._over = over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._running = done = _begin(work, self._loop, over)
        try:
            await over.wait()
        finally:
            if not done.done() or done.exception():
                self.close()
                await over.wait()
        if not done.done():
            raise DirectError(f"{self._transport}: the link was closed")
        try:
            done.result()
        except (RuntimeError, OSError, ValueError) as error:
            raise DirectError(f"{self._transport}: {_first_sentence(error)}") from error

    def _break(self) -> None:
        """End what waits in a thread, which may be about to begin, and then the group: the other end hears."""
        until = time.monotonic() + _END_S
        while self._running.running() and time.monotonic() < until:
            if self._group is not None:
                with contextlib.suppress(RuntimeError):
                    self._break_waits()
            time.sleep(_LOOK_S)
        self._group = self._store = None

    def _break_waits(self) -> None:
        if self._transport == "nccl":
            self._group.abort()
        else:
            import torch

            nothing = torch.empty(1, dtype=torch.uint8)
            self._group.recv([nothing], self._peer, _TAG_OF_NOTHING).wait(timedelta(milliseconds=1))


_MEETING_TIME = timedelta(seconds=_MEET_S)


def _begin(work: Callable[[], None], loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> Future[None]:
    """Work in a thread of its own: many links may block at a time, and a process that ends waits for none."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            done.set_exception(error)
        else:
            done.set_result(None)
        with contextlib.suppress(RuntimeError):  # nobody waits where the loop has ended
            loop.call_soon_threadsafe(over.set)

    done.set_running_or_notify_cancel()
    threading.Thread(target=run, name="direct", daemon=True).start()
    return done


def _named(store: Any, meeting: Meeting) -> Store:
    """The part of a store that only those find who were told the key."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    found: Store = PrefixStore(proof(meeting.key, "store").hex(), store)
    return found


def _group(transport: str, store: Store, rank: int, host: str, timeout: timedelta) -> Any:
    """A group of two outside of torch's global one."""
    if transport == "gloo":
        from torch.distributed import ProcessGroupGloo

        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname=host)], _MEETING_TIME
        return ProcessGroupGloo(store, rank, 2, options)
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _blocking_waits():
        return ProcessGroupNCCL(store, rank, 2, options)


@contextlib.contextmanager
def _blocking_waits() -> Iterator[None]:
    """NCCL's waits block until their time is out, as gloo's do; else its watchdog would end the process then."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def unavailable(transport: str) -> str:
    """Why this process cannot take a direct road; empty where it can."""
    if transport not in ("gloo", "nccl"):
        return f"{transport!r} is none of gloo, nccl"
    if transport == "nccl":
        import torch

        if not torch.cuda.is_available():
            return "nccl needs a GPU, and this process sees none"
        if not torch.distributed.is_nccl_available():
            return "nccl is not in this build of torch"
    return ""


def device_id(transport: str) -> str:
    """What tells the GPU that a link of this process would use from every other one; empty for gloo."""
    if transport != "nccl":
        return ""
    import torch

    return str(torch.cuda.get_device_properties(0).uuid)


def own_address(peer: str) -> str:
    """This machine's address on the way to another."""
    family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asking:
        asking.connect(address)  # of a datagram: nothing is sent
        return str(asking.getsockname()[0])


def proof(key: str, of: str) -> bytes:
    """That somebody knows the key, without telling it."""
    return hmac.digest(key.encode(), of.encode(), "sha256")


def _first_sentence(error: Exception) -> str:
    """Without the place in gloo's source and its advice."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).partition(". ")[0].splitlines()[0]
