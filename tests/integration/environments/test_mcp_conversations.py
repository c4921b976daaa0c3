"""Conversations of the real engine with tools of MCP servers, over stdio and streamable HTTP.

The policy is a tiny model that was taught one conversation: it calls a tool twice, once wrongly, and then answers.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from gspo.common.config.engines import GenerationConfig
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.environments.environment import Environment
from gspo.environments.mcp.tool_listing import with_listed_tools
from gspo.environments.server_environment import environments_on_servers
from gspo.generation.check import check
from gspo.generation.engine.vllm_engine import Engine, engine_arguments
from gspo.generation.rollout.driver import RolloutDriver
from gspo.generation.rollout.episodes import Episodes
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto.rollout_pb2 import (
    OUTCOME_ENVIRONMENT_DONE,
    OUTCOME_TURN_LIMIT,
    GroupTask,
    Play,
    Prompt,
    Rollout,
    Sampling,
)
from tests.support.chat_templates import CHATML, IM, tokenizer_of
from tests.support.environments.mcp_server import command, http_server
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tiny_model
from tests.support.typed.gradients import backward

PROMPT = [{"role": "user", "content": "2+3"}]
# Names the tools, as real templates do at more length.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}<|im_end|>\n"
    "{% endif %}" + CHATML
)
TOKENIZER = tokenizer_of(TEMPLATE, IM, "<|im_end|>")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
MISSPELT = '<tool_call>{"name": "ad", "arguments": {}}</tool_call>'
LINES = [MISSPELT, CALL, "5"]
ANSWERS = ["error: the tool call names 'ad', which is not a tool; there are add, count", "5"]


@dataclass(frozen=True)
class PolicyWithTools:
    """The engine, and the model's folder."""

    engine: Engine
    folder: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PolicyWithTools]:
    folder = tmp_path_factory.mktemp("policy")
    make_tiny_model(folder, tokenizer=TOKENIZER)
    learn_by_heart(folder)
    arguments = engine_arguments(folder, GenerationConfig(max_rollouts=4, kv_cache_gb=0.25), max_model_len=768)
    engine = await Engine.start(arguments, 5)
    yield PolicyWithTools(engine, folder)
    await engine.stop()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http_server() as (address, _):
        yield address


def conversation() -> list[int]:
    """The taught conversation, by the template alone."""
    messages = [*PROMPT]
    for line, answer in zip(LINES, [*ANSWERS, ""], strict=True):
        messages += [{"role": "assistant", "content": line}, {"role": "tool", "content": answer}]
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "count")]
    text = TOKENIZER.apply_chat_template(messages[:-1], tools=tools, tokenize=False)
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def learn_by_heart(folder: Path) -> None:
    """Train the model in `folder` on the conversation until it knows it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    token_BT = torch.tensor([conversation()])
    for _ in range(300):
        logits_BTV = model(input_ids=token_BT, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits_BTV.flatten(0, 1), token_BT[:, 1:].flatten())
        if loss < 0.01:
            break
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
    assert loss < 0.03, f"the policy did not learn its conversation: loss {loss:.3f}"
    model.save_pretrained(folder)


def run_with(mcp: dict[str, Any], folder: Path, model: Path) -> Config:
    """A run whose policy may call two of the server's tools."""
    mcp = {"tools": ["add", "count"], "timeout_s": 30.0, **mcp}
    return make_run(folder, model, environment={"mcp": mcp, "reach_timeout_s": 60.0})


async def played(policy: PolicyWithTools, config: Config, **limits: Any) -> Rollout:
    """The greedy rollout of the prompt."""
    tools = (await with_listed_tools(config)).environment.descriptions
    text = TOKENIZER.apply_chat_template(PROMPT, tools=tools, tokenize=False, add_generation_prompt=True)
    play = {"max_turns": 8, "step_timeout_s": 100, "total_timeout_s": 100, **limits}
    task = GroupTask(
        num_rollouts=1,
        prompt=Prompt(token_ids=TOKENIZER.encode(text, add_special_tokens=False), messages_json=json.dumps(PROMPT)),
        sampling=Sampling(temperature=0.0, max_tokens=500),
        environment=config.environment.label,
        play=Play(tools_json=json.dumps(tools), tool_format="hermes", **play),
    )
    async with environments_on_servers(config.sources, config.reward) as environments:
        episodes = Episodes(cast("Environment", None), TOKENIZER, environments)
        driver = RolloutDriver(policy.engine, TOKENIZER, GenerationConfig(), episodes)
        rollout = await driver.drive(InFlightRollout(task, 0, "generation-0"))
    assert rollout is not None
    return rollout


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_the_policy_calls_a_tool_and_sees_its_result(
    policy: PolicyWithTools, transport: str, url: str, tmp_path: Path
) -> None:
    config = run_with(command() if transport == "stdio" else {"url": url}, tmp_path, policy.folder)
    rollout = await played(policy, config)
    assert rollout.outcome == OUTCOME_ENVIRONMENT_DONE
    turns = json.loads(rollout.episode.turns_json)
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("assistant", MISSPELT),
        ("tool", ANSWERS[0]),
        ("assistant", CALL),
        ("tool", "5"),
        ("assistant", "5"),
    ]
    assert (rollout.episode.num_tool_calls, rollout.episode.num_malformed) == (1, 1)
    assert rollout.episode.reward == 0.0
    # The sampled tokens count, those of a tool do not.
    assert [*rollout.prompt.token_ids, *rollout.token_ids] == conversation()[: -len(TOKENIZER.encode("\n"))]
    sampled = [token for token, counts in zip(rollout.token_ids, rollout.mask, strict=True) if counts]
    assert TOKENIZER.decode(sampled, skip_special_tokens=True) == "".join(LINES)


async def test_a_call_beyond_the_limit_gets_an_error_as_its_answer(
    policy: PolicyWithTools, url: str, tmp_path: Path
) -> None:
    rollout = await played(policy, run_with({"url": url}, tmp_path, policy.folder), max_calls=1, max_turns=2)
    assert rollout.episode.num_tool_calls == 1
    assert rollout.outcome == OUTCOME_TURN_LIMIT


def without(tokenizer: PreTrainedTokenizerFast, template: str, folder: Path) -> Path:
    """A model's folder with another chat template."""
    make_tiny_model(folder, tokenizer=tokenizer)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize(
    ("template", "where", "rule"),
    [
        (CHATML, "environment.mcp", "does not describe the tool 'add'"),
        (
            TEMPLATE + "{% for m in messages %}{% for c in m.tool_calls or [] %}[CALL]{{ c.function.name }}"
            "{% endfor %}{% endfor %}",
            "environment.tool_format",
            "hermes is not how the model's chat template shows calls",
        ),
        (
            TEMPLATE + "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>\n<function="
            "{{ c.function.name }}>{% endfor %}{% endfor %}",
            "environment.tool_format",
            "hermes is not how the model's chat template shows calls",
        ),
    ],
)
def test_a_template_that_does_not_fit_is_refused(
    template: str, where: str, rule: str, url: str, tmp_path: Path
) -> None:
    model = without(TOKENIZER, template, tmp_path / "model")
    with pytest.raises(InputError) as error:
        check(run_with({"url": url}, tmp_path, model))
    assert error.value.where == where
    assert rule in error.value.rule


@pytest.mark.parametrize(
    ("mcp", "where", "message"),
    [
        (command("empty") | {"tools": []}, "environment.mcp", "lists no tool"),
        (command("wrong_list"), "environment.mcp.command", "lists no tools: the server's answer breaks the protocol"),
        (command("empty_pages"), "environment.mcp.command", "lists tools on more than 100 pages"),
        (command("ends"), "environment.mcp.command", "its last words: it needs a key"),
        (command() | {"tools": ["ad"]}, "environment.mcp.tools.0", "Did you mean 'add'?"),
        (command() | {"reads": ["missing.py"]}, "environment.mcp.reads.0", "missing.py does not exist"),
        ({"url": "http://127.0.0.1:9/mcp"}, "environment.mcp.url", "ConnectError"),
    ],
)
def test_a_server_that_gives_no_tools_is_refused(
    mcp: dict[str, Any], where: str, message: str, policy: PolicyWithTools, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        check(run_with(mcp, tmp_path, policy.folder))
    assert error.value.where == where
    assert message in str(error.value)


def test_a_server_that_fits_passes(policy: PolicyWithTools, url: str, tmp_path: Path) -> None:
    check(run_with({"url": url}, tmp_path, policy.folder))
