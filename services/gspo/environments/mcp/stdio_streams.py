"""MCP's messages over the pipes of a program: JSON-RPC, one message a line.

The package `mcp` has such a transport, which keeps a line of any length in memory. Here a longer one than
MAX_MESSAGE_BYTES is dropped, and answered in the server's stead.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from gspo.environments.mcp.server_program import ServerProgram

# Far more than a conversation can hold, and little beside a generator's memory.
MAX_MESSAGE_BYTES = 4 * 2**20
TOO_LARGE = f"the result has more than {MAX_MESSAGE_BYTES} bytes"
_CHUNK_BYTES = 2**16
_ID = re.compile(rb'"id"\s*:\s*(\d+)')
log = structlog.get_logger()
Messages = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


class ProgramStreams(ServerProgram):
    """The messages of one program.

    Attributes:
        refusal: Only a server on the network has one.
    """

    refusal = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Messages]:
        """Start the program, and exchange messages with it; it ends with the block.

        Raises:
            OSError: It does not start.
        """
        received, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, sent = anyio.create_memory_object_stream[SessionMessage](0)
        pumps: list[asyncio.Task[None]] = []
        try:
            stdout, stdin = await self.start()
            pumps = [asyncio.create_task(_receive(stdout, received)), asyncio.create_task(_send(stdin, sent))]
            yield incoming, outgoing
        finally:
            incoming.close()
            outgoing.close()
            await self.close()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            received.close()
            sent.close()


async def _receive(stdout: asyncio.StreamReader, received: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
    """Pass messages on until the program's output ends; after the session they are dropped, so that it can end."""
    lines, is_wanted = Lines(), True
    while chunk := await stdout.read(_CHUNK_BYTES):
        for message in lines.messages(chunk) if is_wanted else ():
            try:
                await received.send(message)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                is_wanted = False
                break
    received.close()


async def _send(stdin: asyncio.StreamWriter, sent: MemoryObjectReceiveStream[SessionMessage]) -> None:
    async for message in sent:
        line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
        stdin.write(line.encode() + b"\n")
        try:
            await stdin.drain()
        except ConnectionError:  # it has ended, which its output says
            return


class Lines:
    """Cuts the bytes of a program into messages; memory is bounded by the longest message."""

    def __init__(self) -> None:
        self._rest, self._is_dropping = bytearray(), False

    def messages(self, chunk: bytes) -> Iterator[SessionMessage]:
        """The messages that end in this chunk. A line that is none is left out, as one that a library prints."""
        for part in chunk.splitlines(keepends=True):
            ends = part.endswith(b"\n")
            if not self._is_dropping:
                self._rest += part
                if len(self._rest) > MAX_MESSAGE_BYTES:
                    yield from self._refusal()
                    self._is_dropping = True
                elif ends:
                    yield from self._read(bytes(self._rest))
            if ends or self._is_dropping:
                self._rest.clear()
            self._is_dropping &= not ends

    def _refusal(self) -> Iterator[SessionMessage]:
        """The answer in place of a result that is too long; none where its request cannot be seen."""
        number = _ID.search(self._rest[:256]) or _ID.search(self._rest[-256:])
        log.warning("mcp_message_too_large", detail=TOO_LARGE)
        if number:
            error = ErrorData(code=INTERNAL_ERROR, message=TOO_LARGE)
            yield SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(number[1]), error=error))

    @staticmethod
    def _read(line: bytes) -> Iterator[SessionMessage]:
        if not line.strip():
            return
        try:
            yield SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            log.debug("mcp_line_without_message", line=line[:200].decode(errors="replace"))
