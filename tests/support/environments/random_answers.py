"""Answers that no honest server gives: random JSON, heads and bytes over HTTP and WebSocket, each by its seed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from websockets.asyncio.server import ServerConnection, serve

VALUES = (
    '"text"', '"\\ud83d"', '"\\u0000\\u001b[31m"', '""', "null", "true", "0.5", "NaN", "1e400", "-Infinity", "1" * 5000,
    "[]", "{}", "[" * 5000, "[" * 900 + "]" * 900, '{"a":' * 500 + "1" + "}" * 500, '"' + "x" * 70_000 + '"',
    '[{"role":"user","content":"\\ud83d"}]', '[{"role":"\\ud83d","content":"x"}]', '[{"role":"nosuch","content":"x"}]',
    '[{"role":"user","content":null}]', '[{"role":"assistant","content":"x","tool_calls":5}]', "[5]",
    '[{"role":"tool","content":"{{ 7 * 7 }}","name":{}}]', '[{"role":"system","content":"x","content":"y"}]',
)  # fmt: skip
STATUSES = (
    "200 OK",
    "200",
    "204 No",
    "302 Found",
    "404 No",
    "429 Busy",
    "500 X",
    "999 \xff",
    "1 \x00",
    "-5 no",
    "101 S",
)
HEADERS = (
    "content-length: -1", "content-length: 99999999999999999999", "content-length: 3, 4", "transfer-encoding: chunked",
    "transfer-encoding: \xff", "location: http://[::1", "location: //a:99999/\x00", "retry-after: NaN", "bad header",
    "retry-after: -1e999", "content-encoding: gzip", "content-encoding: \xe9", "content-type: text/event-stream",
    "content-type: application/json; charset=nosuch", "set-cookie: \xff=\x00", "mcp-session-id: \xff",
    "x: " + "y" * 70_000,
)  # fmt: skip


def value(rng: random.Random) -> str:
    """A JSON text, or nearly."""
    return rng.choice(VALUES)


def message(rng: random.Random) -> str:
    """An answer of an environment, in the form of HTTP and of OpenEnv, with random values."""
    reward, done = rng.choice(["1", value(rng)]), rng.choice(["false", value(rng)])
    fields = f'"observation": {value(rng)}, "reward": {reward}, "done": {done}'
    data = rng.choice([f"{{{fields}}}", f'{{"said": {value(rng)}}}', value(rng)])
    kind = rng.choice(['"observation"', '"error"', value(rng)])
    return rng.choice([f"{{{fields}}}", f'{{"type": {kind}, "data": {data}}}', value(rng)])


def rpc(rng: random.Random, number: int) -> str:
    """A message of MCP, with random values."""
    content = rng.choice([f'[{{"type": "text", "text": {value(rng)}}}]', value(rng)])
    result = rng.choice([f'{{"content": {content}, "isError": {rng.choice(["false", value(rng)])}}}', value(rng)])
    error = rng.choice([f'{{"code": {value(rng)}, "message": {value(rng)}}}', value(rng)])
    call = f'"method": {value(rng)}, "params": {value(rng)}'
    part = rng.choice([f'"result": {result}', f'"error": {error}', call])
    return f'{{"jsonrpc": "2.0", "id": {rng.choice([str(number), str(number), value(rng)])}, {part}}}'


def mangled(rng: random.Random, text: str) -> bytes:
    """The bytes of a text, now and then cut, flipped or replaced."""
    data = bytearray(text.encode("latin-1", errors="replace"))
    match rng.randrange(6):
        case 0:
            del data[rng.randrange(len(data) + 1) :]
        case 1 if data:
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        case 2:
            data = bytearray(rng.randbytes(rng.randrange(200)))
    return bytes(data)


def head(rng: random.Random, size: int) -> str:
    """The head of an answer over HTTP."""
    lines = [f"HTTP/{rng.choice(['1.1', '1.1', '1.0', '9.9'])} {rng.choice([STATUSES[0], rng.choice(STATUSES)])}"]
    lines += rng.sample(HEADERS, rng.choice([0, 0, 1, 2]))
    lines += rng.choice(
        [[f"content-length: {size}"], [f"content-length: {size}", "content-type: application/json"], []]
    )
    return "\r\n".join([*lines, "connection: close", "", ""])


@asynccontextmanager
async def random_http(rng: random.Random, *, is_mcp: bool = False) -> AsyncIterator[int]:
    """A server over HTTP, whose handshake of MCP is an honest one; its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, asyncio.LimitOverrunError, ValueError):
            asked = await reader.readuntil(b"\r\n\r\n")
            size = int(asked.lower().partition(b"content-length:")[2].split(b"\r")[0] or 0)
            asked_body = await reader.readexactly(size)
            writer.write(_mcp_answer(rng, asked_body) if is_mcp else _random_answer(rng, message(rng)))
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


def _random_answer(rng: random.Random, body: str) -> bytes:
    sent = body.encode(errors="replace")
    first = head(rng, len(sent))
    sent = mangled(rng, body) if rng.random() < 0.3 else sent
    return (mangled(rng, first) if rng.random() < 0.3 else first.encode("latin-1")) + sent


def _mcp_answer(rng: random.Random, asked_body: bytes) -> bytes:
    asked = json.loads(asked_body or "{}")
    if asked.get("method") == "tools/call":
        body = rpc(rng, asked["id"])
        return _random_answer(rng, rng.choice([body, f"event: message\ndata: {body}\n\n"]))
    if "id" not in asked:
        return b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    info = {"name": "random", "version": "1"}
    result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    body = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result})
    first = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return (first + body).encode()


@asynccontextmanager
async def random_websocket(rng: random.Random) -> AsyncIterator[int]:
    """A server over WebSocket; its port."""

    async def play(connection: ServerConnection) -> None:
        async for _ in connection:
            match rng.randrange(8):
                case 0:
                    connection.transport.write(rng.randbytes(rng.randrange(1, 50)))
                case 1:
                    await connection.close(rng.choice([1000, 1009, 1011, 4999]), "x" * rng.randrange(100))
                case 2:
                    await connection.send(mangled(rng, message(rng)))
                case _:
                    await connection.send(message(rng))

    async with serve(play, "127.0.0.1", 0) as server:
        yield next(iter(server.sockets)).getsockname()[1]
