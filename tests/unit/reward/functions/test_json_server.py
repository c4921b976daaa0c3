"""Answers of a server that is not ours: each is a value or an error of one kind, within a bound, and leaves nothing."""

from __future__ import annotations

import asyncio
import gzip
import resource
from collections.abc import Sequence
from typing import Any

import pytest

from gspo.reward.functions.json_server import JsonServer
from gspo.reward.sandbox.calls import CallError

pytestmark = pytest.mark.asyncio
_HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
_MIB = 2**20
BOMB = gzip.compress(bytes(2**28))


class RawServer:
    """Answers every request with the same bytes.

    Attributes:
        heads: Those of the requests so far.
    """

    def __init__(self, head: bytes, parts: Sequence[bytes]) -> None:
        self._head, self._parts = head, parts
        self.heads: list[bytes] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            writer.write(_HEAD + self._head + b"\r\n")
            for part in self._parts:
                writer.write(part)
                await writer.drain()
        except OSError:  # the client has gone
            pass
        finally:
            writer.close()


async def asked(head: bytes, parts: Sequence[bytes], times: int = 1) -> tuple[Any, list[bytes]]:
    """The value of the last answer or the kind of its failure, and the heads of the requests."""
    raw, value = RawServer(head, parts), None
    async with await asyncio.start_server(raw.answer, "127.0.0.1", 0) as server:
        client = JsonServer(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=20.0)
        client.max_attempts = 1
        try:
            for _ in range(times):
                value = await client.post({})
        except CallError as error:
            value = error.kind
        finally:
            await client.close()
    return value, raw.heads


@pytest.mark.parametrize(
    ("head", "part", "kind"),
    [
        (b"", bytes(_MIB), "output_too_large"),
        (b"content-encoding: gzip\r\n", BOMB, "invalid_return"),
        (b"content-encoding: gzip\r\n", b"no gzip", "invalid_return"),
        (b"content-type: application/json; charset=zip\r\n", b"{", "invalid_return"),
        (b"", b"[" + b"[]," * 200_000 + b"0]", "invalid_return"),
        (b"content-length: 100\r\n", b"{}", "exception"),
        (b"x: " + bytes([255]) * 2**20 + b"\r\n", b"{}", "exception"),
    ],
    ids=["endless", "bomb", "broken", "charset", "members", "short", "header"],
)
async def test_a_hostile_answer_is_one_error_within_bounds(head: bytes, part: bytes, kind: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parts = [part] * (200 if kind == "output_too_large" else 1)
    assert (await asked(head, parts))[0] == kind
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


async def test_a_server_leaves_no_cookie() -> None:
    value, heads = await asked(b"set-cookie: rollout=1\r\n", [b"1"], times=2)
    assert value == 1
    assert [b"cookie" in head.lower() for head in heads] == [False, False]
