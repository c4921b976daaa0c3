"""Conversations with the real engine, token for token: each turn as vLLM got it, under three chat templates.

The policy is a tiny model that was taught one conversation, spelled letter by letter: its tokens differ from those of
its text. The unit tests of conversations have the rules, without an engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from gspo.common.config.engines import GenerationConfig
from gspo.common.streams.keys import rollout_key
from gspo.environments.environment import Environment
from gspo.generation.engine.vllm_engine import Engine, engine_arguments
from gspo.generation.rollout.driver import RolloutDriver
from gspo.generation.rollout.episodes import Episodes
from gspo.generation.rollout.in_flight import InFlightRollout
from gspo_proto.reward_pb2 import EnvironmentReply, ResetRequest, StepRequest
from gspo_proto.rollout_pb2 import OUTCOME_ENVIRONMENT_DONE, GroupTask, Play, Prompt, Rollout, Sampling
from tests.support.chat_templates import THOUGHT, TOKENIZERS
from tests.support.tiny_model import make_tiny_model
from tests.support.typed.gradients import backward

VERSION, TURN_TOKENS = 5, 40
PROMPT = [{"role": "user", "content": "Guess"}]
# Three turns of the policy: one complete, one cut off at TURN_TOKENS, and the last one.
LINES = [THOUGHT, "24, or so I hope, if that is right at all"[:TURN_TOKENS], "20"]
ANSWERS = [" higher ", " lower ", "right"]


class GuessingGame(Environment):
    """Answers any action, and ends after the third turn."""

    async def begin(self, request: ResetRequest, timeout_s: float) -> EnvironmentReply:
        return EnvironmentReply(state_json="0", version="v1")

    async def step(self, request: StepRequest, timeout_s: float, task_json: str) -> EnvironmentReply:
        turn = int(request.state_json)
        done = turn + 1 == len(ANSWERS)
        answer = json.dumps(ANSWERS[turn])
        return EnvironmentReply(state_json=str(turn + 1), observation_json=answer, reward=0.25, done=done, version="v1")


@dataclass(frozen=True)
class TaughtPolicy:
    """The engine, the same weights in transformers, and every output of vLLM by its request."""

    engine: Engine
    model: PreTrainedModel
    seen: dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TaughtPolicy]:
    folder = tmp_path_factory.mktemp("policy")
    largest = max(TOKENIZERS.values(), key=len)
    model = learn_by_heart(make_tiny_model(folder, tokenizer=largest), [taught(name) for name in ("chatml", "llama3")])
    arguments = engine_arguments(folder, GenerationConfig(max_rollouts=16, kv_cache_gb=0.25), max_model_len=512)
    engine = await Engine.start(arguments, VERSION)
    generate, seen = engine._llm.generate, {}

    async def spied(prompt: Any, sampling: Any, request_id: str) -> AsyncIterator[Any]:
        async for output in generate(prompt, sampling, request_id):
            seen[request_id] = output
            yield output

    engine._llm.generate = spied
    yield TaughtPolicy(engine, model, seen)
    await engine.stop()


def taught(name: str) -> list[int]:
    """The conversation in the words of a template, by the template alone; the policy's turns letter by letter."""
    tokenizer = TOKENIZERS[name]
    messages = [*PROMPT]
    for number, answer in enumerate(ANSWERS):
        messages += [{"role": "assistant", "content": f"turn-{number}"}, {"role": "user", "content": answer}]
    rest, tokens = tokenizer.apply_chat_template(messages, tokenize=False), []
    for number, line in enumerate(LINES):
        before, _, rest = rest.partition(f"turn-{number}")
        letters = [token for letter in line for token in tokenizer.encode(letter, add_special_tokens=False)]
        tokens += [*tokenizer.encode(before, add_special_tokens=False), *letters]
    return [*tokens, tokenizer.eos_token_id]


def learn_by_heart(folder: Path, rows: list[list[int]]) -> PreTrainedModel:
    """Train the model in `folder` on these rows until it knows them, and save it there."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    width = max(map(len, rows))
    token_BT = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    label_BT = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    for _ in range(200):
        logits_BTV = model(input_ids=token_BT, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits_BTV.flatten(0, 1), label_BT[:, 1:].flatten())
        if loss < 0.012:
            break
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
    assert loss < 0.03, f"the policy did not learn its conversation: loss {loss:.3f}"
    model.save_pretrained(folder)
    return model.eval()


async def played(policy: TaughtPolicy, name: str, number: int, temperature: float) -> Rollout:
    tokenizer = TOKENIZERS[name]
    text = tokenizer.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    task = GroupTask(
        group=sorted(TOKENIZERS).index(name),
        num_rollouts=1,
        prompt=Prompt(token_ids=ids, text=text, messages_json=json.dumps(PROMPT)),
        sampling=Sampling(temperature=temperature, max_tokens=400),
        environment="game",
        play=Play(max_turns=8, turn_tokens=TURN_TOKENS, step_timeout_s=10, total_timeout_s=100),
    )
    episodes = Episodes(GuessingGame(), tokenizer)
    rollouts = RolloutDriver(policy.engine, tokenizer, GenerationConfig(), episodes)
    rollout = await rollouts.drive(InFlightRollout(task, number, "generation-0"))
    assert rollout is not None
    return rollout


def check_against_vllm(rollout: Rollout, outputs: list[Any]) -> None:
    """The rollout's tokens are what vLLM got and gave, turn for turn; only what it gave counts, each with its own."""
    tokens, where = [*rollout.prompt.token_ids, *rollout.token_ids], len(rollout.prompt.token_ids)
    assert len(outputs) == rollout.num_turns == len(ANSWERS)
    counts, logp, versions = np.zeros(len(tokens), bool), np.zeros(len(tokens)), np.full(len(tokens), -1)
    for output in outputs:
        begin, sampled = len(output.prompt_token_ids), output.outputs[0]
        end = begin + len(sampled.token_ids)
        assert tokens[:end] == [*output.prompt_token_ids, *sampled.token_ids]
        counts[begin:end], logp[begin:end], versions[begin:end] = True, sampled.logprobs.logprobs, VERSION
    assert end == len(tokens)
    assert [bool(flag) for flag in rollout.mask] == counts[where:].tolist()
    assert list(rollout.logp) == pytest.approx(logp[where:].tolist(), abs=1e-6)
    assert list(rollout.version) == versions[where:].tolist()


def check_against_transformers(policy: TaughtPolicy, rollout: Rollout, temperature: float) -> None:
    """The log-probs of the policy's tokens are those of the whole conversation: vLLM computed on these very tokens."""
    tokens, where = [*rollout.prompt.token_ids, *rollout.token_ids], len(rollout.prompt.token_ids)
    with torch.inference_mode():
        logits_TV = policy.model(torch.tensor([tokens])).logits[0, where - 1 : -1] / temperature
        logp_T = torch.log_softmax(logits_TV, dim=-1).gather(1, torch.tensor(tokens[where:])[:, None])[:, 0]
    counts = np.frombuffer(rollout.mask, bool)
    assert np.abs(np.array(rollout.logp)[counts] - logp_T.numpy()[counts]).max() < 1e-4


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_vllm_gets_the_policys_thoughts_in_the_tokens_that_it_sampled(policy: TaughtPolicy, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    policy.seen.clear()
    rollout = await played(policy, name, 0, 0.1)
    check_against_vllm(rollout, list(policy.seen.values()))
    tokens = [*rollout.prompt.token_ids, *rollout.token_ids]
    assert tokens == taught(name)
    assert (rollout.num_turns, rollout.episode.num_cut_turns) == (3, 1)
    assert (rollout.outcome, rollout.episode.reward) == (OUTCOME_ENVIRONMENT_DONE, 0.75)
    # Neither way of making them anew would have given these tokens.
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False) != tokens
    if name == "qwen3":
        turns = [*PROMPT, *json.loads(rollout.episode.turns_json)]
        assert "half of it?" not in tokenizer.apply_chat_template(turns, tokenize=False)
        assert "half of it?" in text


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_turns_of_any_tokens_add_up_to_what_vllm_saw(policy: TaughtPolicy, name: str) -> None:
    """At such a temperature the policy says anything: bytes that are no text, markers, words of others."""
    policy.seen.clear()
    rollouts = await asyncio.gather(*(played(policy, name, number, 2.0) for number in range(4)))
    for rollout in rollouts:
        prefix = f"{rollout_key(rollout.group, rollout.number)}:"
        check_against_vllm(rollout, [output for request, output in policy.seen.items() if request.startswith(prefix)])
        check_against_transformers(policy, rollout, 2.0)
    assert len({tuple(rollout.token_ids) for rollout in rollouts}) == len(rollouts)
    assert any("�" in rollout.episode.turns_json for rollout in rollouts)
