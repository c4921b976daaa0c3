"""Environments on a server of the user's: one request of a session over HTTP, and how its answer is read.

    POST URL/reset  {"episode_id": "f3...", "task": {"prompt": ..., column: ...}}
    POST URL/step   {"episode_id": "f3...", "request_id": "1", "action": "..."}
    GET  URL/state?episode_id=f3...
    POST URL/close  {"episode_id": "f3..."}

The fields are those of OpenEnv's HTTP API, whose requests name no session. docs/conversations.md has the whole form.
openenv_server.py asks OpenEnv's own servers, which keep sessions over WebSocket alone. Requests are repeated by
server_environment.py.
"""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import httpx

from gspo.common.chat_messages import is_observation
from gspo.common.config.gateway import KEY_VARIABLE
from gspo.common.network.api_keys import key_header
from gspo.common.network.outer_http import AnswerTooLargeError, bounded_answer, outer_client
from gspo.common.plain_json import plain_json, whole_text
from gspo.common.score_numbers import NUMBER_RULE, bounded_number

# An observation of as many bytes is far longer than any conversation.
MAX_REPLY_BYTES = 2**20
TEXT_CHARS = 300
CONNECT_TIMEOUT_S = 10.0
# If a full server names no time, or one beyond these.
_LEAST_WAIT_S, _USUAL_WAIT_S, _LONGEST_WAIT_S = 0.1, 1.0, 60.0

TroubleKind: TypeAlias = Literal[
    "environment_full",
    "environment_unreachable",
    "exception",
    "forbidden",
    "invalid_return",
    "output_too_large",
    "session_lost",
    "timeout",
]


class ServerTroubleError(Exception):
    """A request without a usable answer.

    Attributes:
        retry_after_s: Seconds after which a full server may have a place.
        is_final: Whether it is of no use to ask again.
    """

    def __init__(self, kind: TroubleKind, text: str, retry_after_s: float = _USUAL_WAIT_S) -> None:
        super().__init__(text)
        self.kind, self.retry_after_s, self.is_final = kind, retry_after_s, False


@dataclass(frozen=True)
class ServerTurn:
    """The server's answer to a reset (reward 0, not done) or a step; the observation is text or chat messages."""

    observation: Any
    reward: float = 0.0
    done: bool = False


class SessionServer(Protocol):
    """A server with sessions, by one of its wires. Every method raises ServerTroubleError, and none waits for long.

    Attributes:
        needs_pings: Its sessions end unless they are asked for something from time to time.
        is_shared: Its sessions have no state, so any generator may continue one.
    """

    needs_pings: bool
    is_shared: bool

    async def reset(self, session: str, task: dict[str, Any]) -> ServerTurn:
        """Begin a session under an id of ours."""

    async def step(self, session: str, number: int, action: Any) -> ServerTurn:
        """The answer to the session's action of this number, from 1 on; a repeated number has the same answer."""

    async def num_steps(self, session: str) -> int:
        """The steps that a session has had."""

    async def close(self, session: str) -> None:
        """End a session; one that is not there has ended."""

    async def aclose(self) -> None:
        """Close the connections."""


def server_header() -> dict[str, str]:
    """The header with the server's key, if it wants one."""
    return key_header(KEY_VARIABLE)


class HttpSessions:
    """Sessions over HTTP."""

    needs_pings, is_shared = True, False

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)  # the caller has the other limits
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
        self._client = outer_client(server_header(), timeout, limits=limits)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def reset(self, session: str, task: dict[str, Any]) -> ServerTurn:
        reply = await self._ask("POST", "/reset", {"episode_id": session, "task": task}, begins=True)
        turn = read_reply(reply, f"{self._url}/reset")
        if turn.done:
            raise ServerTroubleError("invalid_return", f"{self._url}/reset answered with an episode that is done")
        return ServerTurn(turn.observation)

    async def step(self, session: str, number: int, action: Any) -> ServerTurn:
        body = {"episode_id": session, "request_id": str(number), "action": action}
        return read_reply(await self._ask("POST", "/step", body), f"{self._url}/step")

    async def num_steps(self, session: str) -> int:
        reply = await self._ask("GET", "/state", query={"episode_id": session})
        if (
            not isinstance(reply, dict)
            or reply.get("episode_id") != session
            or type(reply.get("step_count")) is not int
        ):
            text = "did not answer with the session's episode_id and a step_count"
            raise ServerTroubleError("invalid_return", f"{self._url}/state {text}: {_shown(reply)}")
        return int(reply["step_count"])

    async def close(self, session: str) -> None:
        try:
            await self._ask("POST", "/close", {"episode_id": session}, has_content=False)
        except ServerTroubleError as error:
            if error.kind != "session_lost":
                raise

    async def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: dict[str, str] | None = None,
        begins: bool = False,
        has_content: bool = True,
    ) -> Any:
        """The JSON that the server answers with, None where `has_content` is False."""
        where = self._url + path
        content = None if body is None else json.dumps(whole_text(body))
        headers = {"content-type": "application/json"} if content else {}
        try:
            reply, received = await bounded_answer(
                self._client, method, where, MAX_REPLY_BYTES, content=content, params=query, headers=headers
            )
        except AnswerTooLargeError as error:
            raise ServerTroubleError("output_too_large", f"{where} {error}") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            text = f"{where} gives no answer ({type(error).__name__}: {error})"
            raise ServerTroubleError("environment_unreachable", text) from error
        if not reply.is_success:
            text, lost = f": {received.decode(errors='replace')[:TEXT_CHARS]}", () if begins else (404, 409, 410)
            raise trouble_of_status(where, reply.status_code, reply.headers.get("retry-after"), text, lost=lost)
        return read_json(received.decode(errors="replace"), where) if has_content else None


def trouble_of_status(
    where: str,
    status: int,
    retry_after: str | None,
    text: str = "",
    *,
    lost: Collection[int] = (),
    unreachable: Collection[int] = (502, 504),
) -> ServerTroubleError:
    """The trouble that an HTTP status means.

    Args:
        retry_after: The header of this name.
        text: More of the answer, for the message.
        lost: The statuses that say that a session is not there.
        unreachable: Those of a server, or a proxy, that may answer later.
    """
    why = f"{where} answered HTTP {status}{text}"
    if status in (401, 403):
        return ServerTroubleError("forbidden", f"{why} (its key comes from the environment variable {KEY_VARIABLE})")
    if status in (429, 503):
        return ServerTroubleError("environment_full", why, retry_after_s(retry_after))
    if status in unreachable:
        return ServerTroubleError("environment_unreachable", why)
    return ServerTroubleError("session_lost" if status in lost else "exception", why)


def retry_after_s(header: str | None) -> float:
    """Seconds of a Retry-After header, within bounds; a date, or anything else, is the usual wait."""
    try:
        seconds = float(header or "")
    except ValueError:
        return _USUAL_WAIT_S
    return _USUAL_WAIT_S if math.isnan(seconds) else min(max(seconds, _LEAST_WAIT_S), _LONGEST_WAIT_S)


def read_json(text: str, where: str) -> Any:
    """The value of a JSON text of finite numbers.

    Raises:
        ServerTroubleError: It is none.
    """
    try:
        return plain_json(text)
    except (ValueError, RecursionError) as error:
        why = f"{where} answered with something else than JSON ({error}): {text[:TEXT_CHARS]}"
        raise ServerTroubleError("invalid_return", why) from error


def read_reply(reply: Any, where: str) -> ServerTurn:
    """An answer with its observation, reward and done; a reward of null is 0.

    Raises:
        ServerTroubleError: It has another form.
    """
    if not isinstance(reply, dict):
        raise ServerTroubleError("invalid_return", f"{where} answered with something else than an object")
    observation, reward, done = reply.get("observation"), reply.get("reward"), reply.get("done")
    observation = "" if observation is None else observation
    number = bounded_number(0 if reward is None else reward)
    if not is_observation(observation):
        rule = "an observation that is neither text nor a list of messages with role and content"
    elif number is None:
        rule = f"a reward that is not {NUMBER_RULE}: {_shown(reward)}"
    elif not isinstance(done, bool):
        rule = f"a done that is neither true nor false: {_shown(done)}"
    else:
        return ServerTurn(observation, number, done)
    raise ServerTroubleError("invalid_return", f"{where} answered with {rule}")


def _shown(value: Any) -> str:
    return json.dumps(value)[:100]
