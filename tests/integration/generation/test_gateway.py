"""The gateway with the official clients over HTTP: one real vLLM engine behind two generators, which may be lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio

from gspo.common.errors import InputError
from gspo.gateway.check import check
from gspo.generation.engine.api import Completion, EngineSampling
from tests.integration.generation.conftest import SharedEngine
from tests.support.service_process import make_run
from tests.support.started_gateway import (
    GREEDY,
    MESSAGES,
    PROMPT,
    TOKENIZER,
    Gateway,
    SpeakingEngine,
    started_gateway,
    started_generator,
)
from tests.support.tiny_model import make_tiny_model
from tests.support.weights import stage

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(
    generator: SharedEngine, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    async with started_gateway(generator, redis_url, tmp_path_factory.mktemp("run")) as started:
        yield started


async def test_a_chat_is_the_engines_answer_with_its_log_probs_and_version(gateway: Gateway) -> None:
    expected = await gateway.shared.engine.generate("alone", PROMPT, EngineSampling(max_tokens=40, temperature=0.0))
    raw = await gateway.openai.chat.completions.with_raw_response.create(messages=MESSAGES, logprobs=True, **GREEDY)
    reply = raw.parse()
    choice = reply.choices[0]
    assert choice.message.content == await gateway.greedy_answer()
    assert choice.finish_reason in ("length", "stop")
    assert choice.logprobs and choice.logprobs.content
    assert [round(token.logprob, 4) for token in choice.logprobs.content] == [round(x, 4) for x in expected.logp]
    assert reply.usage and reply.usage.completion_tokens == len(expected.token_ids)
    assert raw.headers["x-gspo-version"] == str(gateway.shared.engine.version)


async def test_every_api_gives_the_same_answer_streamed_or_not(gateway: Gateway) -> None:
    expected = await gateway.greedy_answer()
    stream = await gateway.openai.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == expected
    response = await gateway.openai.responses.create(
        model="policy", input=MESSAGES, temperature=0.0, max_output_tokens=40
    )
    assert response.output_text == expected
    text = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    completion = await gateway.openai.completions.create(prompt=text, **GREEDY)
    assert completion.choices[0].text == expected
    asked: Any = {"messages": MESSAGES, "model": "policy", "max_tokens": 40, "extra_body": {"temperature": 0.0}}
    message = await gateway.anthropic.messages.create(**asked)
    assert "".join(block.text for block in message.content if block.type == "text") == expected
    async with gateway.anthropic.messages.stream(**asked) as stream_of_messages:
        assert "".join([text async for text in stream_of_messages.text_stream]) == expected
    assert [model.id async for model in gateway.openai.models.list()] == ["policy"]


async def test_a_stop_string_ends_the_answer_and_the_request(gateway: Gateway) -> None:
    expected = await gateway.greedy_answer()
    stop = expected[5]
    reply = await gateway.openai.chat.completions.create(messages=MESSAGES, stop=[stop], **GREEDY)
    assert reply.choices[0].message.content == expected[: expected.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    await idle(gateway)


async def test_an_answer_continues_under_new_weights(gateway: Gateway, tmp_path: Path) -> None:
    shared, sampling = gateway.shared, {**GREEDY, "temperature": 1.0, "max_tokens": 200}
    before = shared.engine.version
    # Made before the answers, which go on meanwhile.
    folder = make_tiny_model(tmp_path / "new", seed=20 + before, scale=4.0)
    stage(shared.copies, folder)
    raw: Any = gateway.openai.chat.completions.with_raw_response
    asking = [asyncio.create_task(raw.create(messages=MESSAGES, seed=number + 1, **sampling)) for number in range(8)]
    async with asyncio.timeout(60):
        while shared.engine.num_running < len(asking) // 2:  # some may end early
            await asyncio.sleep(0.01)
    await shared.engine.load(before + 1, shared.copies, on_update="recompute", timeout_s=60)
    shared.folders.append(folder)
    spans = {(await reply).headers["x-gspo-version"] for reply in asking}
    assert f"{before}-{before + 1}" in spans


TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def test_an_answer_survives_its_generator(generator: SharedEngine, redis_url: str, tmp_path: Path) -> None:
    long = {**GREEDY, "max_tokens": 200}
    async with started_gateway(generator, redis_url, tmp_path / "run", num_generators=1) as gateway:
        expected = await gateway.greedy_answer(200)
        stream = await gateway.openai.chat.completions.create(messages=MESSAGES, stream=True, **long)
        text = ""
        async with started_generator(gateway.service, generator, "generation-1"):
            async for chunk in stream:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                if text and gateway.generators:
                    await gateway.generators.pop().lose()
        assert not gateway.generators
        assert text == expected


async def test_without_a_generator_the_client_gets_an_error_of_its_own_kind(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    async with started_gateway(
        generator, redis_url, tmp_path / "run", num_generators=0, request_timeout_s=1.0
    ) as gateway:
        with pytest.raises(openai.InternalServerError, match="no generator has finished") as refused:
            await gateway.openai.chat.completions.create(messages=MESSAGES, **GREEDY)
        assert refused.value.status_code == 503


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n": 2, "temperature": 1.0}, "n is not supported here: a request gets one answer"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not supported here"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported here"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs is not supported here"),
        ({"response_format": {"type": "json_object"}}, "response_format constrains the answer"),
        ({"tools": TOOLS}, "the run has no gateway.tool_parser to read its calls"),
        ({"messages": [{"role": "user", "content": "x" * 900}]}, "512"),
        ({"messages": []}, "empty conversation"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a/b"}}]}]},
            "a message has a part that is not text: image_url, and the policy reads text alone",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 0.005}, "temperature 0.005 is below 0.01, the least above 0"),
    ],
)
async def test_what_generators_do_not_take_is_refused(gateway: Gateway, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        await gateway.openai.chat.completions.create(**{"messages": MESSAGES, **GREEDY, **keys})


async def test_images_are_refused_in_the_words_of_each_api(gateway: Gateway) -> None:
    message = "a message has a part that is not text: {}, and the policy reads text alone. Leave it out"
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]
    with pytest.raises(anthropic.BadRequestError, match=message.format("image")):
        await gateway.anthropic.messages.create(
            model="policy", max_tokens=4, messages=cast("Any", [{"role": "user", "content": parts}])
        )
    part = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    with pytest.raises(openai.BadRequestError, match=message.format("input_image")):
        await gateway.openai.responses.create(model="policy", input=cast("Any", [{"role": "user", "content": [part]}]))


async def test_unknown_models_paths_and_callers_are_refused(gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        await gateway.openai.chat.completions.create(messages=MESSAGES, **{**GREEDY, "model": "gpt-5"})
    for client in (gateway.openai.with_options(api_key="other"), gateway.anthropic.with_options(api_key="other")):
        with pytest.raises(Exception, match="the shared token is missing or wrong"):
            await client.models.list()
    async with httpx.AsyncClient(headers={"x-api-key": gateway.anthropic.api_key or ""}) as caller:
        huge = await caller.post(f"http://{gateway.address}/v1/messages", json={"messages": "x" * 17_000_000})
        assert huge.status_code == 413
        assert (await caller.get(f"http://{gateway.address}/v1/files")).status_code == 404


class EndlessEngine(SpeakingEngine):
    """One whose answers end by a cancellation alone.

    Attributes:
        num_running: Requests.
    """

    num_running = 0

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: EngineSampling) -> Completion:
        """It never returns."""
        self.num_running += 1
        try:
            never: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            return await never
        finally:
            self.num_running -= 1


async def test_a_client_that_hangs_up_leaves_no_request_in_the_engine(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    engine: Any = EndlessEngine("the beginning and the end")
    shared = replace(generator, engine=engine)
    async with started_gateway(shared, redis_url, tmp_path / "run") as gateway:
        stream = await gateway.openai.chat.completions.create(
            messages=MESSAGES, model="policy", max_tokens=200, stream=True
        )
        text = ""
        while not text:
            text = (await anext(stream)).choices[0].delta.content or ""
        assert engine.num_running == 1
        await stream.close()
        await idle(gateway)


CONSTRAINTS: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "parallel_tool_calls": False,
}


async def test_a_tool_call_reaches_clients_in_their_own_form(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    add = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 22}}\n</tool_call>'
    engine: Any = SpeakingEngine(add)
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tool: Any = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": schema}}
    shared = replace(generator, engine=engine)
    keys = {"model_name": "student", "tool_parser": "hermes"}
    async with started_gateway(shared, redis_url, tmp_path / "run", gateway=keys) as gateway:
        asked: Any = {"messages": MESSAGES, "tools": [tool], "model": "student"}
        reply = await gateway.openai.chat.completions.create(**asked)
        (call,) = reply.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 22})
        assert reply.choices[0].finish_reason == "tool_calls"
        stream = await gateway.openai.chat.completions.create(**asked, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        parts = [part.function for delta in deltas for part in delta.tool_calls or [] if part.function]
        assert "".join(part.name or "" for part in parts) == "add"
        assert json.loads("".join(part.arguments or "" for part in parts)) == {"a": 1, "b": 22}
        message = await gateway.anthropic.messages.create(
            model="student",
            max_tokens=200,
            messages=MESSAGES,
            tools=[{"name": "add", "description": "adds", "input_schema": schema}],
        )
        used = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
        assert used == [("add", {"a": 1, "b": 22})]
        assert message.stop_reason == "tool_use"
        for key, value in CONSTRAINTS.items():
            with pytest.raises(openai.BadRequestError, match=f"{key} constrains the answer"):
                await gateway.openai.chat.completions.create(**asked, extra_body={key: value})


async def test_thoughts_are_separated(generator: SharedEngine, redis_url: str, tmp_path: Path) -> None:
    engine: Any = SpeakingEngine("Here is my thought process: I add. Here is my response: 22")
    shared = replace(generator, engine=engine)
    async with started_gateway(shared, redis_url, tmp_path / "run", gateway={"reasoning_parser": "granite"}) as gateway:
        reply = await gateway.openai.chat.completions.create(messages=MESSAGES, model="policy")
    message = reply.choices[0].message.to_dict()
    assert (str(message["reasoning"]).strip(), str(message["content"]).strip()) == ("I add.", "22")


@pytest.mark.parametrize("key", ["tool_parser", "reasoning_parser"])
async def test_an_unknown_parser_is_refused_before_the_start(generator: SharedEngine, tmp_path: Path, key: str) -> None:
    config = make_run(tmp_path, generator.folders[0], gateway={"replicas": 1, key: "qwen33"})
    with pytest.raises(InputError, match=rf"gateway.{key}: qwen33 is not a parser of vLLM. Did you mean"):
        check(config)


async def test_a_parser_that_does_not_fit_the_model_is_refused(generator: SharedEngine, tmp_path: Path) -> None:
    config = make_run(tmp_path, generator.folders[0], gateway={"replicas": 1, "tool_parser": "deepseek_v3"})
    with pytest.raises(InputError, match=r"gateway.tool_parser: vLLM's parser does not work .* tool call start/end"):
        check(config)


async def test_a_history_with_deep_arguments_is_the_clients_error(gateway: Gateway) -> None:
    call: Any = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "[" * 90_000}}
    history: Any = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, *MESSAGES]
    with pytest.raises(openai.BadRequestError, match="nested too deeply"):
        await gateway.openai.chat.completions.create(messages=history, model="policy")


async def idle(gateway: Gateway) -> None:
    """Wait until the engine has no request."""
    async with asyncio.timeout(10):
        while gateway.shared.engine.num_running:
            await asyncio.sleep(0.01)
