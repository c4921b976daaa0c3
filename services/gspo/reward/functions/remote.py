"""A reward function behind an HTTP server of the user's, by OpenRLHF's remote form.

    POST URL  {"query": [prompt and answer, ...], "prompts": [...], "labels": [...]}
    200       {"rewards": [number, ...]}, also with "extra_logs": {name: [number, ...]}, or the bare list

A call is tried again when the server cannot be reached, is busy or fails (429, 5xx), until the function's time limit.
Its reply is read as strictly as the values of a local function. Addresses come from the configuration alone: a
submission cannot name one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from gspo.common.config.reward import RewardFunction
from gspo.reward.functions.arguments import OPENRLHF_ARGUMENTS
from gspo.reward.sandbox.calls import Answer, CallError, Code, Question, Signature
from gspo.reward.sandbox.values import whole_text

MAX_ATTEMPTS = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
MAX_REPLY_BYTES = 8 * 2**20
TEXT_CHARS = 300
_JSON = {"content-type": "application/json"}


class ServerBusyError(Exception):
    """The server cannot answer now; a later try may succeed."""


class HttpCaller:
    """JSON to an HTTP server and back, tried again until a deadline."""

    def __init__(self, url: str, *, timeout_s: float, headers: dict[str, str] | None = None) -> None:
        self._url, self._timeout_s, self._headers = url, timeout_s, headers or {}
        self._client: httpx.AsyncClient | None = None

    async def post(self, body: dict[str, Any]) -> Any:
        """The JSON that the server answers with.

        Raises:
            CallError: There was none within the time limit and the tries, or the server refused the request.
        """
        # Made at first use: a client belongs to the loop that uses it.
        client = self._client = self._client or httpx.AsyncClient(timeout=self._timeout_s, headers=self._headers)
        tries = AsyncRetrying(
            retry=retry_if_exception_type(ServerBusyError),
            wait=wait_exponential_jitter(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            stop=stop_after_attempt(MAX_ATTEMPTS),
        )
        last = "no answer"
        try:
            async with asyncio.timeout(self._timeout_s):
                async for attempt in tries:
                    with attempt:
                        try:
                            return await self._post_once(client, body)
                        except ServerBusyError as error:
                            last = str(error)
                            raise
        except TimeoutError:
            raise CallError("timeout", f"{self._url} gave no answer within {self._timeout_s:g} s ({last})") from None
        except RetryError:
            raise CallError("exception", f"{self._url} failed {MAX_ATTEMPTS} times: {last}") from None
        raise AssertionError("unreachable: the tries end by an answer or an error")

    async def _post_once(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        try:
            content = json.dumps(whole_text(body), allow_nan=False)
        except ValueError as error:
            raise CallError("exception", f"cannot be asked: {error}") from error
        try:
            reply = await client.post(self._url, content=content, headers=_JSON)
        except httpx.TransportError as error:
            raise ServerBusyError(f"{type(error).__name__}: {error}") from error
        if reply.status_code == httpx.codes.TOO_MANY_REQUESTS or reply.is_server_error:
            raise ServerBusyError(f"HTTP {reply.status_code}: {reply.text[:TEXT_CHARS]}")
        if not reply.is_success:
            raise CallError("exception", f"{self._url} answered HTTP {reply.status_code}: {reply.text[:TEXT_CHARS]}")
        if len(reply.content) > MAX_REPLY_BYTES:
            raise CallError("output_too_large", f"{self._url} answered with {len(reply.content)} bytes")
        try:
            return whole_text(reply.json())
        except (ValueError, RecursionError) as error:
            text = f"{self._url} answered with something else than JSON: {reply.text[:TEXT_CHARS]}"
            raise CallError("invalid_return", text) from error

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


class RemoteFunction:
    """One such server.

    Args:
        timeout_s: Longest a call may take, all tries together.
        fields: Further fields of every request.
    """

    signature = Signature("POST", "openrlhf", frozenset(OPENRLHF_ARGUMENTS), (), takes_any=True)

    def __init__(self, url: str, *, timeout_s: float, fields: dict[str, Any]) -> None:
        self._http, self._fields = HttpCaller(url, timeout_s=timeout_s), fields

    async def load(self) -> Signature:
        """Return the signature: the first batch makes the first request."""
        return self.signature

    async def call(self, question: Question, *, session: str | None = "") -> Answer:  # noqa: ARG002 - it has no state
        """The rewards of one batch.

        Raises:
            CallError: The server did not answer in time, or its reply has another form.
        """
        arguments, started = question["arguments"], time.perf_counter()
        fields = {"query": arguments["queries"], "prompts": arguments["prompts"], "labels": arguments["labels"]}
        reply = await self._http.post({**self._fields, **fields})
        values = read_rewards(reply, len(arguments["queries"]))
        return Answer(values, "", time.perf_counter() - started)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def read_rewards(reply: Any, count: int) -> list[Any]:
    """The rewards as inside/results.py encodes them.

    Raises:
        CallError: They are not `count` numbers.
    """
    rewards = reply.get("rewards") if isinstance(reply, dict) else reply
    if not isinstance(rewards, list) or len(rewards) != count:
        was = f"{len(rewards)} values" if isinstance(rewards, list) else type(rewards).__name__
        raise CallError("invalid_return", f'returned {was} as "rewards" for {count} answers')
    extras = reply.get("extra_logs") if isinstance(reply, dict) else None
    logged = {
        str(name): values
        for name, values in (extras if isinstance(extras, dict) else {}).items()
        if isinstance(values, list) and len(values) == count
    }
    if not logged:
        return [_plain(reward) for reward in rewards]
    return [
        {"parts": {"score": _plain(reward), **{name: _plain(values[i]) for name, values in logged.items()}}}
        for i, reward in enumerate(rewards)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) or abs(value) < 2**1000 else math.inf
    return None if value is None else {"type": type(value).__name__}


def read_remote(function: RewardFunction) -> Code:
    """An address of the configuration; its version is that of the address and the further fields."""
    text = json.dumps([function.url, function.args], sort_keys=True, default=str)
    return Code(function.label, "", hashlib.sha256(text.encode()).hexdigest(), function.url or "")
