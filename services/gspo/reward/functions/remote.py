"""Reward functions behind an HTTP server: the user's own, and a language model as a judge.

They need the network, so they run beside the sandbox. Addresses come from the configuration alone: a submission cannot
name one. A call is tried again when the server cannot be reached, is busy or fails (429, 5xx), until the function's
time limit. A reply is read as strictly as the values of a local function.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from typing import Annotated, Any

import httpx
from pydantic import Field, PositiveFloat, PositiveInt
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from gspo.common.config.fields import Section
from gspo.common.plain_json import whole_text
from gspo.reward.functions.arguments import OPENRLHF_ARGUMENTS, ground_truth, text_of
from gspo.reward.sandbox.calls import Answer, CallError, Question, Signature

MAX_ATTEMPTS = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
MAX_REPLY_BYTES = 8 * 2**20
TEXT_CHARS = 300
PROMPT = """Judge the answer to a task.

Task:
{prompt}

Answer:
{answer}

Say in one or two sentences what is right and wrong with it. Then end with a line that holds one number from 0 (wrong
or useless) to 10 (entirely right) and nothing else."""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class ServerBusyError(Exception):
    """The server cannot answer now; a later try may succeed."""


class HttpFunction:
    """A function that is asked by JSON over HTTP, again until a deadline.

    Args:
        timeout_s: Longest that one post may take, all tries together.
    """

    signature: Signature

    def __init__(self, url: str, *, timeout_s: float, headers: dict[str, str] | None = None) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._client = httpx.AsyncClient(timeout=timeout_s, headers=headers)

    async def load(self) -> Signature:
        """Return the signature: the first batch makes the first request."""
        return self.signature

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def post(self, body: dict[str, Any]) -> Any:
        """The JSON that the server answers with.

        Raises:
            CallError: There was none within the time limit and the tries, or the server refused the request.
        """
        try:
            content = json.dumps(whole_text(body), allow_nan=False)
        except ValueError as error:
            raise CallError("exception", f"cannot be asked: {error}") from error
        problems = ["no answer"]
        tries = AsyncRetrying(
            retry=retry_if_exception_type(ServerBusyError),
            wait=wait_exponential_jitter(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            stop=stop_after_attempt(MAX_ATTEMPTS),
            before_sleep=lambda state: problems.append(str(state.outcome and state.outcome.exception())),
            reraise=True,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                return await tries(self._post_once, content)
        except TimeoutError:
            text = f"{self._url} gave no answer within {self._timeout_s:g} s ({problems[-1]})"
            raise CallError("timeout", text) from None
        except ServerBusyError as error:
            raise CallError("exception", f"{self._url} failed {MAX_ATTEMPTS} times: {error}") from None

    async def _post_once(self, content: str) -> Any:
        try:
            reply = await self._client.post(self._url, content=content, headers={"content-type": "application/json"})
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


class RemoteFunction(HttpFunction):
    """A server of the user's, by OpenRLHF's remote form.

        POST URL  {"query": [prompt and answer, ...], "prompts": [...], "labels": [...]}
        200       {"rewards": [number, ...]}, also with "extra_logs": {name: [number, ...]}, or the bare list

    Args:
        timeout_s: Longest a call may take, all tries together.
        fields: Further fields of every request.
    """

    signature = Signature("POST", "openrlhf", frozenset(OPENRLHF_ARGUMENTS), (), takes_any=True)

    def __init__(self, url: str, *, timeout_s: float, fields: dict[str, Any]) -> None:
        super().__init__(url, timeout_s=timeout_s)
        self._fields = fields

    async def call(self, question: Question, *, session: str | None = "") -> Answer:  # noqa: ARG002 - it has no state
        """The rewards of one batch.

        Raises:
            CallError: The server did not answer in time, or its reply has another form.
        """
        arguments = question["arguments"]
        fields = {"query": arguments["queries"], "prompts": arguments["prompts"], "labels": arguments["labels"]}
        reply = await self.post({**self._fields, **fields})
        return Answer(read_rewards(reply, len(arguments["queries"])))


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
    return [
        {"parts": {"score": _plain(reward), **{name: _plain(values[i]) for name, values in logged.items()}}}
        for i, reward in enumerate(rewards)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) or abs(value) < 2**1000 else math.inf
    return None if value is None else {"type": type(value).__name__}


class JudgeOptions(Section):
    """`args` of the built-in `llm_judge`."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$", description="Address up to and including /v1")]
    model: str
    prompt: str = Field(PROMPT, description="With {prompt}, {answer} and {ground_truth} where they belong")
    divide_by: PositiveFloat = Field(10.0, description="The number is divided by this")
    max_tokens: PositiveInt = 512
    concurrency: PositiveInt = Field(16, description="Requests in flight at a time")
    api_key_variable: str = Field("GSPO_JUDGE_API_KEY", description="Environment variable with the key, if one is set")


class Judge(HttpFunction):
    """The built-in `llm_judge`: a language model at an OpenAI-compatible address scores an answer.

    Each answer is one POST to URL/chat/completions, at temperature 0; the last number of the reply is the score.

    Args:
        timeout_s: Longest that one answer's judgement may take, all tries together.
    """

    signature = Signature("llm_judge", "trl", frozenset({"prompts", "completions"}), (), takes_any=True)

    def __init__(self, options: JudgeOptions, *, timeout_s: float) -> None:
        key = os.environ.get(options.api_key_variable, "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        super().__init__(options.url.rstrip("/") + "/chat/completions", timeout_s=timeout_s, headers=headers)
        self._options = options
        self._free = asyncio.Semaphore(options.concurrency)

    async def call(self, question: Question, *, session: str | None = "") -> Answer:  # noqa: ARG002 - it has no state
        """A score for each answer; one that cannot be judged fails alone."""
        arguments = question["arguments"]
        columns = {name: values for name, values in arguments.items() if isinstance(values, list)}
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(arguments["completions"]))]
        return Answer(await asyncio.gather(*map(self._judge, rows)))

    async def _judge(self, row: dict[str, Any]) -> Any:
        fields = {"{prompt}": text_of(row["prompts"]), "{answer}": text_of(row["completions"])}
        if "{ground_truth}" in self._options.prompt:
            fields["{ground_truth}"] = str(ground_truth(row))
        # All at once: the text "{ground_truth}" in an answer must not be replaced.
        parts = re.split(r"(\{(?:prompt|answer|ground_truth)\})", self._options.prompt)
        body = {
            "model": self._options.model,
            "messages": [{"role": "user", "content": "".join(fields.get(part, part) for part in parts)}],
            "temperature": 0,
            "max_tokens": self._options.max_tokens,
        }
        try:
            async with self._free:
                return read_score(await self.post(body)) / self._options.divide_by
        except CallError as error:
            return {"error": {"type": "UnfitError", "text": str(error), "kind": error.kind}}


def read_score(reply: Any) -> float:
    """The last number of the judge's reply.

    Raises:
        CallError: The reply is not a chat completion, or has no number.
    """
    try:
        text = reply["choices"][0]["message"]["content"]
        numbers = _NUMBER.findall(text)
    except (KeyError, IndexError, TypeError) as error:
        raise CallError("invalid_return", f"the judge sent no chat completion: {str(reply)[:TEXT_CHARS]}") from error
    if not numbers:
        raise CallError("invalid_return", f"the judge named no number: {text[-TEXT_CHARS:]}")
    return float(numbers[-1])
