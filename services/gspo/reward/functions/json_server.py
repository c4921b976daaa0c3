"""A server that answers a JSON body with JSON, asked again while it cannot be reached, is busy or fails.

It knows neither functions nor teachers: those are remote.py and scoring/taught_tokens.py.
"""

import asyncio
import json
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, stop_never, wait_exponential_jitter

from gspo.common.network.outer_http import AnswerTooLargeError, bounded_answer, outer_client
from gspo.common.plain_json import TOO_MANY_MEMBERS, has_many_members, whole_text
from gspo.reward.sandbox.calls import CallError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
TEXT_CHARS = 300
_CONNECT_S = 10.0
_JSON = {"content-type": "application/json"}


class ServerBusyError(Exception):
    """The server cannot answer now; a later try may succeed."""


class UnansweredError(CallError):
    """The server gave no answer, within the time or the tries; it may be asked again."""


class JsonServer:
    """A server that is asked by JSON over HTTP, again until a deadline.

    Args:
        timeout_s: Longest that one post may take, all tries together.

    Attributes:
        max_attempts: Tries of one post; None: as many as the time allows.
        max_reply_bytes: The most bytes of an answer.
    """

    max_attempts: int | None = 6
    max_reply_bytes = 8 * 2**20

    def __init__(self, url: str, *, timeout_s: float, headers: dict[str, str] | None = None) -> None:
        self._url, self._timeout_s = url, timeout_s
        limits = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
        self._client = outer_client(headers or {}, limits)

    async def close(self) -> None:
        await self._client.aclose()

    def is_passing(self, status: int) -> bool:
        """Whether an error of this HTTP status may be gone at the next try: the server is busy, or failed."""
        return status == httpx.codes.TOO_MANY_REQUESTS or httpx.codes.is_server_error(status)

    def read_reply(self, body: bytes) -> Any:
        """The value of an answer that may have any content.

        Raises:
            ValueError, RecursionError: It has another form than JSON, or too many members.
        """
        if has_many_members(body):
            raise ValueError(TOO_MANY_MEMBERS)
        return whole_text(json.loads(body))

    def note_problem(self, problem: str) -> None:
        """Called with the error of each try that another one follows."""

    async def post(self, body: dict[str, Any]) -> Any:
        """The JSON that the server answers with.

        Raises:
            UnansweredError: There was none within the time limit and the tries.
            CallError: The server refused the request, or its answer cannot be read.
        """
        try:
            content = json.dumps(whole_text(body), allow_nan=False)
        except ValueError as error:
            raise CallError("exception", f"cannot be asked: {error}") from error
        problems = ["no answer"]

        def note(problem: str) -> None:
            problems.append(problem)
            self.note_problem(problem)

        tries = AsyncRetrying(
            retry=retry_if_exception_type(ServerBusyError),
            wait=wait_exponential_jitter(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            stop=stop_never if self.max_attempts is None else stop_after_attempt(self.max_attempts),
            before_sleep=lambda state: note(str(state.outcome and state.outcome.exception())),
            reraise=True,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                return await tries(self._post_once, content)
        except TimeoutError:
            text = f"{self._url} gave no answer within {self._timeout_s:g} s ({problems[-1]})"
            raise UnansweredError("timeout", text) from None
        except ServerBusyError as error:
            raise UnansweredError("exception", f"{self._url} failed {self.max_attempts} times: {error}") from None

    async def _post_once(self, content: str) -> Any:
        try:
            reply, body = await bounded_answer(
                self._client, "POST", self._url, self.max_reply_bytes, content=content, headers=_JSON
            )
        except AnswerTooLargeError as error:
            raise CallError("output_too_large", f"{self._url} {error}") from error
        except httpx.TransportError as error:
            raise ServerBusyError(f"{type(error).__name__}: {error}") from error
        shown = body[:TEXT_CHARS].decode(errors="replace")
        if not reply.is_success:
            status = f"HTTP {reply.status_code}: {shown}"
            if self.is_passing(reply.status_code):
                raise ServerBusyError(status)
            raise CallError("exception", f"{self._url} answered {status}")
        try:
            return self.read_reply(body)
        except (ValueError, RecursionError) as error:
            text = f"{self._url} answered with something else than JSON: {shown}"
            raise CallError("invalid_return", text) from error
