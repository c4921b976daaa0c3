"""Sessions of OpenEnv's own servers, over WebSocket, as openenv 0.10 and openenv-core 0.3 speak it.

Each connection to URL/ws is a session, which ends with it. Messages are JSON objects:

    {"type": "reset", "data": {column: ..., "episode_id": "f3..."}}   {"type": "step", "data": {FIELD: "..."}}
    {"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}}
    {"type": "error", "data": {"message": "...", "code": "CAPACITY_REACHED"}}

Over HTTP these servers make a new environment for every request, so a conversation cannot be played that way.
"""

import json
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from gspo.common.plain_json import whole_text
from gspo.environments.session_server import (
    CONNECT_TIMEOUT_S,
    MAX_REPLY_BYTES,
    TEXT_CHARS,
    ServerTroubleError,
    ServerTurn,
    TroubleKind,
    read_json,
    read_reply,
    server_header,
    trouble_of_status,
)

_TOO_LARGE = 1009  # RFC 6455: a message beyond the limit


class _DirectConnect(connect):
    """A connection to the address of the configuration alone: a server's redirect could lead to any other."""

    def process_redirect(self, exc: Exception) -> Exception:
        """The answer with the redirect, as an error."""
        return exc


class OpenEnvSessions:
    """Sessions over WebSocket.

    Args:
        action_field: Field of the action that takes the policy's text.
        observation_field: Field of the observation that the policy sees; None: all of them, as JSON.
        ping_every_s: Time between WebSocket's own pings.
    """

    needs_pings, is_shared = False, False

    def __init__(self, url: str, *, action_field: str, observation_field: str | None, ping_every_s: float) -> None:
        self._url = "ws" + url.removeprefix("http").rstrip("/") + "/ws"
        self._action_field, self._observation_field = action_field, observation_field
        self._ping_every_s = ping_every_s
        self._connections: dict[str, ClientConnection] = {}

    async def aclose(self) -> None:
        for session in list(self._connections):
            await self.close(session)

    async def reset(self, session: str, task: dict[str, Any]) -> ServerTurn:
        self._connections[session] = await self._connect()
        try:
            turn = await self._ask(session, "reset", {**task, "episode_id": session})
        except ServerTroubleError:
            await self.close(session)  # the next try has another connection
            raise
        if turn.done:
            raise ServerTroubleError("invalid_return", f"{self._url} answered a reset with an episode that is done")
        return ServerTurn(turn.observation)

    async def step(self, session: str, number: int, action: Any) -> ServerTurn:  # noqa: ARG002 - the connection counts
        return await self._ask(session, "step", {self._action_field: action})

    async def num_steps(self, session: str) -> int:
        """Only the connection that began a session can go on with it."""
        raise ServerTroubleError("session_lost", f"session {session} of {self._url} ended with its connection")

    async def close(self, session: str) -> None:
        if connection := self._connections.pop(session, None):
            await connection.close()

    async def _connect(self) -> ClientConnection:
        try:
            return await _DirectConnect(
                self._url,
                additional_headers=server_header(),
                max_size=MAX_REPLY_BYTES,
                open_timeout=CONNECT_TIMEOUT_S,
                ping_interval=self._ping_every_s,
                ping_timeout=None,  # a step may keep the server's event loop for as long as it likes
            )
        except InvalidStatus as error:
            status, retry_after = error.response.status_code, error.response.headers.get("retry-after")
            text = ", and a redirect is not followed" * (300 <= status < 400)
            raise trouble_of_status(self._url, status, retry_after, text, unreachable=range(500, 600)) from error
        except (OSError, WebSocketException) as error:
            text = f"{self._url} gives no answer ({type(error).__name__}: {error})"
            raise ServerTroubleError("environment_unreachable", text) from error

    async def _ask(self, session: str, message_type: str, data: dict[str, Any]) -> ServerTurn:
        connection = self._connections.get(session)
        if connection is None:
            raise ServerTroubleError("session_lost", f"session {session} of {self._url} ended with its connection")
        try:
            with suppress(ConnectionClosed):  # a full server has closed it, and its reason can be read
                await connection.send(json.dumps(whole_text({"type": message_type, "data": data})))
            content = await connection.recv()
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code == _TOO_LARGE:
                text = f"{self._url} answered with more than {MAX_REPLY_BYTES} bytes"
                raise ServerTroubleError("output_too_large", text) from error
            text = f"{self._url} closed the connection ({error})"
            raise ServerTroubleError("session_lost", text) from error
        text = content if isinstance(content, str) else content.decode(errors="replace")
        return self._read(read_json(text, self._url))

    def _read(self, reply: Any) -> ServerTurn:
        """The answer in a message, with the part of its observation that the policy sees as text."""
        data = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(data, dict) or reply.get("type") not in ("observation", "error"):
            raise ServerTroubleError("invalid_return", f"{self._url} sent neither an observation nor an error")
        if reply["type"] == "error":
            kind: TroubleKind = "environment_full" if data.get("code") == "CAPACITY_REACHED" else "exception"
            raise ServerTroubleError(kind, f"{self._url} answered {json.dumps(data)[:TEXT_CHARS]}")
        observation = data.get("observation")
        if isinstance(observation, dict):
            observation = self._seen(observation)
        reward = data.get("reward")
        data = {**data, "observation": observation, "reward": float(reward) if isinstance(reward, bool) else reward}
        return read_reply(data, self._url)

    def _seen(self, observation: dict[str, Any]) -> Any:
        """The part of an observation that the policy sees."""
        name = self._observation_field
        if name is None:
            return json.dumps({key: value for key, value in observation.items() if key != "metadata"})
        if name not in observation:
            others = ", ".join(observation)[:TEXT_CHARS]
            text = f"{self._url} sent an observation without the field {name}, but with {others}"
            raise ServerTroubleError("invalid_return", f"{text} (environment.observation_field)")
        value = observation[name]
        return value if isinstance(value, str | list) else json.dumps(value)
