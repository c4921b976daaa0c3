"""Reward functions behind an HTTP server: the user's own, and a language model as a judge.

They need the network, so they run beside the sandbox. Addresses come from the configuration alone: a submission cannot
name one. json_server.py tries a call again until the function's time limit. A reply is read as strictly as the values
of a local function.
"""

import asyncio
import re
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from gspo.common.config.fields import Section
from gspo.common.network.api_keys import key_header
from gspo.reward.functions.arguments import OPENRLHF_ARGUMENTS, ground_truth, text_of
from gspo.reward.functions.json_server import TEXT_CHARS, JsonServer
from gspo.reward.sandbox.calls import Answer, CallError, Question, Signature
from gspo.reward.sandbox.inside.results import plain_value, type_name

PROMPT = """Judge the answer to a task.

Task:
{prompt}

Answer:
{answer}

Say in one or two sentences what is right and wrong with it. Then end with a line that holds one number from 0 (wrong
or useless) to 10 (entirely right) and nothing else."""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class HttpFunction(JsonServer):
    """A function that is asked by JSON over HTTP."""

    signature: Signature

    async def load(self) -> Signature:
        """Return the signature: the first batch makes the first request."""
        return self.signature


class RemoteFunction(HttpFunction):
    """A server of the user's, by OpenRLHF's remote form.

        POST URL  {"query": [prompt and answer, ...], "prompts": [...], "labels": [...]}
        200       {"rewards": [number, ...]}, also with "extra_logs": {name: [number, ...]}, or the bare list.
                  A number in place of a list of extra_logs is that of each answer.

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
    rewards: Any = reply.get("rewards") if isinstance(reply, dict) else reply
    _check_values('"rewards"', rewards, count)
    extras = (reply.get("extra_logs") if isinstance(reply, dict) else None) or {}
    if not isinstance(extras, dict):
        raise CallError("invalid_return", f'returned {type(extras).__name__} as "extra_logs", not an object')
    logged = {name: [it] * count if isinstance(it, int | float) else it for name, it in extras.items()}
    for name, values in logged.items():
        _check_values(f'extra_logs["{name[:TEXT_CHARS]}"]', values, count)
    return [
        {"parts": {"score": _plain(reward), **{name: _plain(values[i]) for name, values in logged.items()}}}
        for i, reward in enumerate(rewards)
    ]


def _check_values(name: str, values: Any, count: int) -> None:
    if not isinstance(values, list) or len(values) != count:
        was = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
        raise CallError("invalid_return", f"returned {was} as {name} for {count} answers")


def _plain(value: Any) -> Any:
    """As of a local function, but that a server has no dict as a number."""
    return {"type": type_name(value)} if isinstance(value, dict) else plain_value(value)


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
        url, headers = options.url.rstrip("/") + "/chat/completions", key_header(options.api_key_variable)
        super().__init__(url, timeout_s=timeout_s, headers=headers)
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
