"""The built-in `llm_judge`: a language model at an OpenAI-compatible address scores an answer.

Each answer is one POST to URL/chat/completions, at temperature 0; the last number of the reply is the score. It is a
trusted part of gspo that needs the network, so it runs beside the sandbox.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from gspo.common.config.fields import Section
from gspo.common.config.reward import RewardFunction
from gspo.reward.functions.arguments import ground_truth, text_of
from gspo.reward.functions.remote import TEXT_CHARS, HttpCaller
from gspo.reward.functions.sources import read_options
from gspo.reward.sandbox.calls import Answer, CallError, Code, Question, Signature

PROMPT = """Judge the answer to a task.

Task:
{prompt}

Answer:
{answer}

Say in one or two sentences what is right and wrong with it. Then end with a line that holds one number from 0 (wrong
or useless) to 10 (entirely right) and nothing else."""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_SIGNATURE = Signature("llm_judge", "trl", frozenset({"prompts", "completions"}), (), takes_any=True)


class JudgeOptions(Section):
    """`args` of the built-in."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$", description="Address up to and including /v1")]
    model: str
    prompt: str = Field(PROMPT, description="With {prompt}, {answer} and {ground_truth} where they belong")
    divide_by: PositiveFloat = Field(10.0, description="The number is divided by this")
    max_tokens: PositiveInt = 512
    concurrency: PositiveInt = Field(16, description="Requests in flight at a time")
    api_key_variable: str = Field("GSPO_JUDGE_API_KEY", description="Environment variable with the key, if one is set")


def read_judge(function: RewardFunction, key: str) -> tuple[Code, JudgeOptions]:
    """The judge of a configuration; its version is that of its options, the key left out.

    Raises:
        InputError: An option is missing, unknown or of a wrong type.
    """
    options = read_options(JudgeOptions, function, key)
    version = hashlib.sha256(options.model_dump_json().encode()).hexdigest()
    return Code(function.label, "", version, options.url), options


class Judge:
    """One judge.

    Args:
        timeout_s: Longest that one answer's judgement may take, all tries together.
    """

    signature = _SIGNATURE

    def __init__(self, options: JudgeOptions, *, timeout_s: float) -> None:
        self._options = options
        key = os.environ.get(options.api_key_variable, "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = options.url.rstrip("/") + "/chat/completions"
        self._http = HttpCaller(url, timeout_s=timeout_s, headers=headers)
        self._free = asyncio.Semaphore(options.concurrency)

    async def load(self) -> Signature:
        """Return the signature: the first batch makes the first request."""
        return self.signature

    async def call(self, question: Question, *, session: str | None = "") -> Answer:  # noqa: ARG002 - it has no state
        """A score for each answer; one that cannot be judged fails alone."""
        arguments, started = question["arguments"], time.perf_counter()
        count = len(arguments["completions"])
        columns = {name: values for name, values in arguments.items() if isinstance(values, list)}
        rows = [{name: values[i] for name, values in columns.items()} for i in range(count)]
        values = await asyncio.gather(*(self._judge(row) for row in rows))
        return Answer(list(values), "", time.perf_counter() - started)

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
                return read_score(await self._http.post(body)) / self._options.divide_by
        except CallError as error:
            return {
                "error": {"type": "UnfitError", "text": str(error), "place": "", "traceback": "", "kind": error.kind}
            }

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


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
