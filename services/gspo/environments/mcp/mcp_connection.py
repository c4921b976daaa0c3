"""One connection to an MCP server: it lists tools and calls them, from the handshake to the end.

The client of the package `mcp` belongs to the task that opened it, so each connection has one. A connection that has
ended stays so: mcp_sessions.py opens another.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mcp import Client, MCPError
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT, CallToolResult, ListToolsResult, Tool
from pydantic import ValidationError

from gspo.common.config.gateway import McpConfig
from gspo.environments.mcp.http_streams import HttpStreams
from gspo.environments.mcp.stdio_streams import ProgramStreams
from gspo.environments.session_server import TEXT_CHARS, ServerTroubleError
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.memory_watch import MemoryWatch

# A list of tools that never ends must fill neither memory nor time; no prompt describes as many.
_MOST_TOOLS, _MOST_PAGES = 1000, 100
_CLOSE_S = 10.0
# The client's library gives a call's own limit back as an error; this is beyond it.
_LATER_S = 5.0
# Of an answer over HTTP that is too long or malformed; its code is that of a closed connection, which is another thing.
_BROKEN_ANSWER = "SSE stream failed"
T = TypeVar("T")
# It logs tracebacks of the faults of servers; here these are answers to the policy, or failed attempts.
logging.getLogger("mcp").setLevel(logging.CRITICAL)
logging.getLogger("httpx2").setLevel(logging.WARNING)


@dataclass(frozen=True)
class RefusedCall:
    """A call without a result; the policy sees the reason.

    Attributes:
        kind: timeout or error.
    """

    kind: str
    text: str


class McpConnection:
    """A connection.

    Args:
        level: The confinement of a command's process; None for an address.
        watch: Ends a command's process if it has too much memory.
    """

    def __init__(self, config: McpConfig, level: ConfinementLevel | None, watch: MemoryWatch) -> None:
        self._config = config
        self._streams = HttpStreams(config.place) if level is None else ProgramStreams(config, level, watch)
        self._client: Client | None = None
        self._is_lost = False  # the server has ended it, and the client's task may still wait
        self._ready, self._closing = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls may be made."""
        return self._client is not None and self._task is not None and not self._task.done() and not self._is_lost

    @property
    def pid(self) -> int | None:
        """The first process of the command; None where there is none."""
        return self._streams.pid

    async def open(self, timeout_s: float) -> None:
        """Connect, and exchange the handshake.

        Raises:
            ServerTroubleError: The server does not answer, or refuses.
        """
        self._task = asyncio.create_task(self._run())
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({self._task, ready}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.is_set():
                late = "" if self._task.done() else f" within {timeout_s:g} s"
                raise self._trouble(f"did not answer MCP's handshake{late}")
        except BaseException:
            await self.close()
            raise
        finally:
            ready.cancel()

    async def tools(self) -> list[Tool]:
        """The tools that the server lists.

        Raises:
            ServerTroubleError: It gives no list.
        """
        tools, cursor, place = list[Tool](), None, self._config.place
        deadline_s = time.monotonic() + self._config.timeout_s
        for _ in range(_MOST_PAGES):
            page = await self._ask(partial(_page, cursor=cursor))
            if isinstance(page, RefusedCall):
                raise ServerTroubleError("exception", f"{place} lists no tools: {page.text}")
            tools, cursor = [*tools, *page.tools], page.next_cursor
            if len(tools) > _MOST_TOOLS:
                raise ServerTroubleError("output_too_large", f"{place} lists more than {_MOST_TOOLS} tools")
            if not cursor:
                return tools
            if time.monotonic() > deadline_s:
                raise ServerTroubleError("timeout", f"{place} lists no end of tools in {self._config.timeout_s:g} s")
        raise ServerTroubleError("output_too_large", f"{place} lists tools on more than {_MOST_PAGES} pages")

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult | RefusedCall:
        """The result of a call, or why there is none.

        Raises:
            ServerTroubleError: The connection has ended.
        """
        return await self._ask(lambda client: client.call_tool(name, arguments, self._config.timeout_s))

    async def close(self) -> None:
        """End the connection, with the process or the session."""
        self._closing.set()
        if self._task is None:
            return
        if self._client is None:  # the handshake does not end by itself
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=_CLOSE_S)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        # The handshake rather than the newest version's discovery: every server knows it, and it begins a session.
        async with Client(self._streams.opened(), mode="legacy", cache=None) as client:
            self._client = client
            self._ready.set()
            await self._closing.wait()

    async def _ask(self, request: Callable[[Client], Coroutine[Any, Any, T]]) -> T | RefusedCall:
        """The answer to one request, or a RefusedCall."""
        if self._client is None or self._task is None or self._task.done():
            raise self._trouble("has ended the connection")
        asking = asyncio.create_task(request(self._client))
        try:
            limit_s = self._config.timeout_s + _LATER_S
            await asyncio.wait({asking, self._task}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                if self._task.done():
                    raise self._trouble("has ended the connection")
                return self._late()
            return asking.result()
        except MCPError as error:
            return self._refused(error)
        except (ValidationError, RuntimeError) as error:
            return RefusedCall("error", f"the server's answer breaks the protocol ({str(error)[:TEXT_CHARS]})")
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _refused(self, error: MCPError) -> RefusedCall:
        if error.code == REQUEST_TIMEOUT:
            return self._late()
        if error.message.startswith(_BROKEN_ANSWER):
            return RefusedCall("error", f"the server's answer cannot be read ({error.message})")
        refusal = self._streams.refusal
        if error.code == CONNECTION_CLOSED or (refusal and refusal.kind != "exception"):
            self._is_lost = True
            raise self._trouble("has ended the connection") from error
        return RefusedCall("error", error.message)

    def _late(self) -> RefusedCall:
        return RefusedCall("timeout", f"no result within {self._config.timeout_s:g} s")

    def _trouble(self, what: str) -> ServerTroubleError:
        """Why there is no connection, as well as it is known."""
        if self._streams.refusal is not None:
            return self._streams.refusal
        failed = self._task is not None and self._task.done() and not self._task.cancelled() and self._task.exception()
        reasons = [_reason(failed)] if failed else []
        if self._streams.last_line:
            reasons.append(f"its last words: {self._streams.last_line[:TEXT_CHARS]}")
        why = f" ({'; '.join(reasons)})" if reasons else ""
        return ServerTroubleError("environment_unreachable", f"{self._config.place} {what}{why}")


async def _page(client: Client, cursor: str | None) -> ListToolsResult:
    return await client.list_tools(cursor=cursor)


def _reason(error: BaseException) -> str:
    """The first error of a group, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:TEXT_CHARS]
