"""The sessions of rollouts on MCP servers: each turn's calls are made in their order, and their results are one answer.

Faults of the policy and of a tool are answers to the policy. Faults of the server are a ServerTroubleError;
services/gspo/environments/server_environment.py begins the rollout anew then, or asks again.
"""

import asyncio
import json
from typing import Any

from mcp_types import CallToolResult, ContentBlock, EmbeddedResource, TextContent, TextResourceContents

from gspo.common.config.reward import EnvironmentConfig
from gspo.common.plain_json import whole_text
from gspo.common.telemetry import metrics
from gspo.environments.mcp.mcp_connection import McpConnection, RefusedCall
from gspo.environments.session_server import ServerTroubleError, ServerTurn
from gspo.reward.sandbox.launch import ConfinementLevel, LevelName
from gspo.reward.sandbox.levels import find_agent_level
from gspo.reward.sandbox.memory_watch import MemoryWatch

# The one session of all rollouts.
_SHARED = ""


class McpSessions:
    """Sessions on one MCP server; SessionServer has the methods.

    Args:
        sandbox_minimum: The least confinement level of a command's processes.
    """

    needs_pings = False

    def __init__(self, environment: EnvironmentConfig, sandbox_minimum: LevelName) -> None:
        self._config, self._sandbox_minimum = environment.mcp, sandbox_minimum
        self._level: ConfinementLevel | None = None
        self._finding, self._watch = asyncio.Lock(), MemoryWatch()
        self._open_timeout_s = environment.reach_timeout_s
        self.is_shared = environment.mcp.per == "shared"
        self._connections: dict[str, McpConnection] = {}
        self._opening = asyncio.Lock()

    @property
    def pids(self) -> list[int]:
        """The first process of each session that has one."""
        return [connection.pid for connection in self._connections.values() if connection.pid is not None]

    async def aclose(self) -> None:
        connections = list(self._connections.values())
        self._connections.clear()
        await asyncio.gather(*(connection.close() for connection in connections))

    async def reset(self, session: str, task: dict[str, Any]) -> ServerTurn:  # noqa: ARG002 - tools know no task
        """Begin a session: the policy's turn comes first."""
        await self._connected(session, begins=True)
        return ServerTurn("")

    async def step(self, session: str, number: int, action: Any) -> ServerTurn:  # noqa: ARG002 - the connection counts
        """The results of a turn's calls; a turn without one is the last."""
        calls = action["calls"] if isinstance(action, dict) else []
        if not calls:
            return ServerTurn("", done=True)
        connection = await self._connected(session, begins=False)
        messages = []
        for call in calls:
            text = await self._answer(connection, call["name"], call["arguments"])
            messages.append({"role": "tool", "name": call["name"], "content": text})
        return ServerTurn(messages)

    async def num_steps(self, session: str) -> int:
        """A session's state is in its process, or known to its connection alone."""
        raise ServerTroubleError("session_lost", f"session {session} of {self._config.place} ended with its generator")

    async def close(self, session: str) -> None:
        """End a session; a shared one stays."""
        if connection := self._connections.pop(session, None):
            await connection.close()

    async def _connected(self, session: str, *, begins: bool) -> McpConnection:
        """The session's connection: of a rollout's own from its reset on, a shared one whenever there is none."""
        if not self.is_shared:
            return await self._open(session) if begins else self._begun(session)
        async with self._opening:
            connection = self._connections.get(_SHARED)
            if connection is None or not connection.is_open:
                await self.close(_SHARED)
                connection = await self._open(_SHARED)
            return connection

    async def _open(self, session: str) -> McpConnection:
        level = None if self._config.url else await self._find_level()
        connection = McpConnection(self._config, level, self._watch)
        self._connections[session] = connection
        try:
            await connection.open(self._open_timeout_s)
        except BaseException:
            self._connections.pop(session, None)
            raise
        return connection

    async def _find_level(self) -> ConfinementLevel:
        async with self._finding:
            self._level = self._level or await find_agent_level(self._sandbox_minimum)
            return self._level

    def _begun(self, session: str) -> McpConnection:
        connection = self._connections.get(session)
        if connection is None:
            raise ServerTroubleError("session_lost", f"{self._config.place} has no session {session}")
        return connection

    async def _answer(self, connection: McpConnection, name: str, arguments: dict[str, Any]) -> str:
        """The answer to one call, as the policy sees it."""
        try:
            result = await connection.call(name, arguments)
        except ServerTroubleError as error:
            # Its state is gone, so only a shared server may be asked again.
            error.is_final = not self.is_shared
            raise
        if isinstance(result, RefusedCall):
            kind, text = result.kind, f"error: {result.text}"
        else:
            text = _text_of_result(result)
            kind, text = ("error", f"error: {text}") if result.is_error else ("", text)
        if len(text) > self._config.max_result_chars:
            kind = kind or "cut"
            text = f"{text[: self._config.max_result_chars]}... ({len(text)} characters)"
        if kind:
            metrics.TOOL_ERRORS.labels(name, kind).inc()
        return text


def _text_of_result(result: CallToolResult) -> str:
    """The texts of a result, each other content by its kind; the structured content where there is nothing else."""
    texts = [text for block in result.content if (text := _text_of(block))]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return str(whole_text("\n".join(texts))) or "(no result)"


def _text_of(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    if isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
        return block.resource.text
    return f"({block.type}, which cannot be shown)"
