"""The refusals of every HTTP server before its app: real servers, and requests byte by byte from hostile callers."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gspo.common.config.schema import ServicesConfig
from gspo.common.network import http_server
from gspo.common.network.accepting import RESERVED_DESCRIPTORS, ConnectionCounts, raise_descriptor_limit
from gspo.common.network.http_server import ASGIApp, BoundedBodies, HttpServer, Receive, Scope, Send, reply

TIMEOUT_S = 0.5
NAMES = ServicesConfig(http_hosts=("gspo.example.org", "*.svc.cluster.local"))


class Echo:
    """Answers with the body's length, after the checks."""

    num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_calls += 1
        body = (await receive())["body"] if scope["method"] == "POST" else b""
        await reply(send, 200, {"bytes": len(body)})


ECHO = Echo()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port() -> AsyncIterator[int]:
    async for number in serve(BoundedBodies(ECHO, 2**20)):
        yield number


async def serve(app: ASGIApp, timeout_s: float = 60.0) -> AsyncIterator[int]:
    server = HttpServer(app, "127.0.0.1", 0, NAMES, takes_forms=True, request_timeout_s=timeout_s)
    task = asyncio.create_task(server.run())
    yield int(server.address.rpartition(":")[2])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def ask(port: int, *headers: str, method: str = "GET", host: str | None = None, body: bytes = b"") -> int:
    """The status of one request."""
    host = f"127.0.0.1:{port}" if host is None else host
    lines = [f"{method} /v1/state HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", *headers]
    return (await send_raw(port, "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body))[0]


async def send_raw(port: int, data: bytes) -> tuple[int, str]:
    """Status and body of the answer; 0 if the connection is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            head, _, text = (await reader.read()).partition(b"\r\n\r\n")
        return (int(head.split()[1]), text.decode()) if head else (0, "")
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("10.244.1.7:8000", 200),  # kubelet sends the pod's address
        ("[fd00::7]:8000", 200),
        ("localhost", 200),
        (socket.gethostname(), 200),
        ("GSPO.example.org.", 200),
        ("gspo-reward.ns.svc.cluster.local:8000", 200),
        ("", 200),  # HTTP/1.0, as haproxy's checks; no browser leaves it out
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8000", 421),
        ("gspo.example.org.evil.example", 421),
        ("svc.cluster.local", 421),
        ("2130706433", 421),
        ("127.1", 421),
        ("evil.example@127.0.0.1", 421),
        ("[::1", 421),
    ],
)
async def test_a_request_names_a_host_that_is_ours(port: int, host: str, status: int) -> None:
    assert await ask(port, host=host) == status


OWN = "Origin: http://127.0.0.1:{port}"
LINK = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document")


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("POST", ("Content-Type: application/json",), 200),
        ("POST", ("Content-Type: Application/JSON; charset=utf-8", OWN, "Sec-Fetch-Site: same-origin"), 200),
        ("POST", ("Content-Type: multipart/form-data; boundary=x",), 200),
        ("POST", ("Content-Type: multipart/form-data; boundary=x", "Origin: https://evil.example"), 403),
        ("POST", ("Content-Type: application/json", "Sec-Fetch-Site: cross-site"), 403),
        ("POST", ("Content-Type: application/json", "Sec-Fetch-Site: same-site"), 403),
        ("POST", ("Content-Type: application/json", "Origin: null"), 403),
        ("POST", ("Content-Type: application/json", "Origin: http://127.0.0.1:1"), 403),
        ("POST", ("Content-Type: application/json", *LINK), 403),
        ("POST", ("Content-Type: text/plain",), 415),
        ("POST", ("Content-Type: application/x-www-form-urlencoded",), 415),
        ("POST", (), 415),
        ("DELETE", ("Origin: https://evil.example",), 403),
        ("DELETE", (), 200),
        ("GET", ("Origin: https://evil.example",), 403),
        ("GET", ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image"), 403),
        ("GET", (*LINK[:2], "Sec-Fetch-Dest: iframe"), 403),
        ("GET", LINK, 200),
        ("GET", ("Sec-Fetch-Site: none",), 200),
        ("GET", ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: AAAA"), 400),
    ],
)
async def test_a_page_of_another_site_is_refused(port: int, method: str, headers: tuple[str, ...], status: int) -> None:
    sent = [one.format(port=port) for one in headers]
    before = ECHO.num_calls
    assert await ask(port, *sent, method=method) == status
    assert ECHO.num_calls == before + (status == 200), "what is refused does not reach the app"


async def test_a_header_without_end_is_cut(port: int) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
    num_sent = 0
    with pytest.raises(ConnectionError):
        for _ in range(3000):  # 300 MiB, were it taken
            writer.write(b"a" * 100 * 2**10)
            await writer.drain()
            num_sent += 100 * 2**10
    writer.close()
    assert num_sent < 30 * 2**20, "what the kernel's buffers hold, and no more"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 32 * 2**10


_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
_HALF_A_POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"


@pytest.mark.parametrize(
    ("part", "status"), [(b"", 0), (b"GET / HT", 0), (_HALF_A_POST, 0), (_GET + _HALF_A_POST, 200)]
)
async def test_a_request_that_never_ends_is_given_up(part: bytes, status: int) -> None:
    started = time.monotonic()
    async for port in serve(BoundedBodies(ECHO, 2**20), TIMEOUT_S):
        assert (await send_raw(port, part))[0] == status
    assert time.monotonic() - started >= TIMEOUT_S * 0.9


async def test_a_body_that_is_too_large_is_refused_unread(port: int) -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"%x\r\n%s\r\n" % (2**19, b"a" * 2**19)
    for rest in (b"Content-Length: 2097152\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + rest)
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"the body has more than 1048576 bytes" in answer
        writer.close()


async def test_an_answer_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = asyncio.Event()
    monkeypatch.setattr("gspo.common.network.http_server.note_refusal", lambda *_, **__: given_up.set())

    async def tells_much(_scope: Scope, _receive: Receive, send: Send) -> None:
        await reply(send, 200, {"text": "x" * 2**25})

    async for port in serve(tells_much, TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(20):
            await given_up.wait()
            with pytest.raises((ConnectionError, EOFError)):
                await reader.readexactly(2**25)
        writer.close()


async def test_bodies_of_callers_that_are_refused_are_not_kept() -> None:
    async def refuses(_scope: Scope, _receive: Receive, send: Send) -> None:
        await reply(send, 401, {})

    size = 4 * 2**20
    head = f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = []
    async for port in serve(refuses):
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode())
            for _ in range(15):  # all of it but the end
                writer.write(b"a" * (size // 16))
                await writer.drain()
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401")
            held.append(writer)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 48 * 2**10, "200 MiB were sent"
        for writer in held:
            writer.close()


async def test_many_bodies_at_a_time_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.common.network.http_server.MAX_BUFFERED_BYTES", 2**20)
    full, free = asyncio.Event(), asyncio.Event()
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    statuses: list[int] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        full.set()
        await free.wait()
        await reply(send, 200, {})

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"a" * (2**20 - 1)}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(int(str(message["status"])))

    bounded = BoundedBodies(app, 2**20)
    first = asyncio.create_task(bounded(scope, receive, send))  # type: ignore[arg-type]
    await full.wait()
    await bounded(scope, receive, send)  # type: ignore[arg-type]
    assert statuses == [503]
    free.set()
    await first
    await bounded(scope, receive, send)  # type: ignore[arg-type]
    assert statuses == [503, 200, 200]


async def test_a_long_url_is_414(port: int) -> None:
    for length, status in ((http_server.MAX_URL_BYTES - 3, 200), (70_000, 414)):
        request = f"GET /v1?{'a' * length} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert (await send_raw(port, request.encode()))[0] == status


# Connects as fast as it can, then slowly until its input ends, and keeps 900 open. argv: port, fast attempts.
STORM = """
import select, socket, sys
kept, num_fast = [], int(sys.argv[2])
while num_fast > 0 or not select.select([sys.stdin], [], [], 0.01)[0]:
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", int(sys.argv[1])))
    kept = [*kept[-900:], connection]
    num_fast -= 1
    if num_fast == 0:
        print("done", flush=True)
"""


async def test_a_storm_from_one_address_takes_half_of_the_connections_and_nobody_elses_time() -> None:
    """10,000 attempts beside a caller from another address, who is answered each time."""
    most = 40
    server = HttpServer(Echo(), "127.0.0.1", 0, ServicesConfig(http_connections=most))
    port = int(server.address.rpartition(":")[2])
    task = asyncio.create_task(server.run())
    base, largest, num_answers = num_descriptors(), 0, 0
    command = sys.executable, "-c", STORM, str(port), "10000"
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None and process.stdout is not None
    done = asyncio.ensure_future(process.stdout.readline())
    # The fast part may end before the caller's next answer: the slow part lasts until enough is counted.
    async with asyncio.timeout(60):
        while not done.done() or num_answers <= 3 or largest <= most // 2 - 3:
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
                writer.close()
            num_answers += 1
            largest = max(largest, num_descriptors() - base)
    assert await done == b"done\n"
    # Half of the connections, the caller's at both ends, and the pipes of the storm's process.
    assert largest < most // 2 + 8
    process.stdin.close()
    await process.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_proxy_may_have_half_of_the_connections_that_are_set() -> None:
    """300 agents behind one address, each with a connection that it keeps for all its requests."""
    server = HttpServer(Echo(), "127.0.0.1", 0, ServicesConfig(http_connections=600))
    task = asyncio.create_task(server.run())
    port = int(server.address.rpartition(":")[2])
    agents = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
    for _ in range(2):
        for _, writer in agents:
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(30):
            heads = await asyncio.gather(*(reader.readuntil(b"\r\n\r\n") for reader, _ in agents))
        assert {head.split(b"\r\n")[0] for head in heads} == {b"HTTP/1.1 200 OK"}
        for reader, _ in agents:
            await reader.read(2**16)
    for _, writer in agents:
        writer.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def num_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def test_the_end_of_a_connection_lets_another_in() -> None:
    server = HttpServer(Echo(), "127.0.0.1", 0, ServicesConfig(http_connections=10))
    port = int(server.address.rpartition(":")[2])
    task = asyncio.create_task(server.run())
    others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
    with pytest.raises(ConnectionResetError):
        assert await ask(port, host="localhost")
    for _, writer in others:
        writer.close()
    async with asyncio.timeout(5):
        while await status_or_none(port) != 200:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def status_or_none(port: int) -> int | None:
    try:
        return await ask(port, host="localhost")
    except ConnectionResetError:
        return None


def test_a_process_with_few_descriptors_has_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (300, 1024))
    assert (ConnectionCounts(512).most, ConnectionCounts(20).most) == (300 - RESERVED_DESCRIPTORS, 20)
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, limits: raised.append(limits))
    raise_descriptor_limit()
    assert raised == [(1024, 1024)]


@pytest.mark.parametrize(("host", "name"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname())])
def test_the_address_of_a_server_is_one_that_others_can_call(host: str, name: str) -> None:
    """0.0.0.0 in a heartbeat would send every caller to itself."""
    server = HttpServer(_never_called, host, 0)
    try:
        assert server.address.rpartition(":")[0] == name
        assert int(server.address.rpartition(":")[2]) > 0
    finally:
        server.close()


async def _never_called(*_: object) -> None:
    raise AssertionError("there is no request")
