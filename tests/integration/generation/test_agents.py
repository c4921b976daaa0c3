"""Agents at the gateway: what they ask of a real vLLM engine becomes rollouts, token for token."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

import anthropic
import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage
from transformers import AutoTokenizer

from gspo.agents.player.task import Task
from gspo.agents.worker import FAILURE_KINDS, LARGEST_REWARD, AgentFailedError, AgentWorker, RunUnreachableError
from gspo.common.score_numbers import LARGEST_NUMBER
from gspo.common.streams.entries import SCHEMA
from gspo.gateway.sessions.task_api import FinishRequest
from gspo.learner.assembly.rollout_limits import rollout_limits
from gspo.learner.assembly.rows import row_from_scored
from gspo_proto.rollout_pb2 import GroupTask, Prompt, RewardUse, Rollout, Sampling, Score, Scored, ScoredRollout
from tests.integration.generation.conftest import SharedEngine
from tests.integration.generation.test_engine import Reference
from tests.support.started_gateway import TOKENIZER, Gateway, SpeakingEngine, started_gateway
from tests.support.tiny_model import make_tiny_model
from tests.support.typed.redis_entries import stream_entries
from tests.support.weights import stage

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
AGENT = {"external": True, "lease_s": 30.0, "answer_tokens": 40}
LENGTHS = {"prompt_length": 128, "response_length": 384, "rollout_length": 768}
FIRST: Any = {"role": "user", "content": "Count to three."}
TEMPERATURE = 0.9


@dataclass
class Player:
    """A program that plays a rollout: a lease, and clients with its key."""

    lease: dict[str, Any]
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    anthropic: AsyncAnthropic

    async def chat(self, *messages: Any, **keys: Any) -> Any:
        reply = await self.openai.chat.completions.create(
            **{"model": "policy", "messages": list(messages), "temperature": 0.0, **keys}
        )
        return {"role": "assistant", "content": reply.choices[0].message.content}

    async def claude(self, *messages: Any, temperature: float) -> Any:
        """A message of Anthropic's API, whose client has no argument for temperatures any more."""
        return await self.anthropic.messages.create(
            model="policy", max_tokens=20, messages=list(messages), extra_body={"temperature": temperature}
        )

    async def post(self, what: str, body: Any = None, key: str = "") -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.lease['key']}"}
        return await self.http.post(f"/v1/tasks/{self.lease['id']}/{what}", json=body or {}, headers=headers)

    async def finish(self, reward: float | None = 1.0, **more: Any) -> None:
        reply = await self.post("finish", {"reward": reward, **more})
        assert reply.status_code == 204, reply.text


class AgentRun:
    """A run whose rollouts agents play: its gateway, the tasks that the test issues, and the rollouts that come."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway, self._group = gateway, 0
        self.redis, self.keys = gateway.service.redis, gateway.service.keys
        self.token = {"authorization": f"Bearer {gateway.service.options.token}"}

    async def issue(
        self, num_rollouts: int = 1, max_tokens: int = LENGTHS["response_length"], **more: Any
    ) -> GroupTask:
        """A task as the coordinator issues it."""
        self._group += 1
        prompt = Prompt(token_ids=[5], text="p", messages_json=json.dumps([FIRST]), columns_json='{"answer": "3"}')
        keys: dict[str, Any] = {"prompt": prompt} | more
        task = GroupTask(
            schema=SCHEMA,
            group=self._group,
            attempt=1,
            num_rollouts=num_rollouts,
            sampling=Sampling(temperature=TEMPERATURE, max_tokens=max_tokens, top_p=1.0),
            rewards=[RewardUse(name="agent", weight=1.0)],
            issued_unix_s=time.time(),
            **keys,
        )
        await self.redis.hset(self.keys.open, str(self._group), "{}")
        stream = self.keys.eval_prompts if task.evaluation else self.keys.prompts
        await self.redis.xadd(stream, {"d": task.SerializeToString()})
        return task

    async def lease(self, address: str = "") -> Player:
        url = f"http://{address or self.gateway.address}"
        http = httpx.AsyncClient(base_url=url, timeout=30)
        reply = await http.post("/v1/tasks/lease", json={"worker": "w", "wait_s": 10}, headers=self.token)
        assert reply.status_code == 200, reply.text
        lease = reply.json()
        clients: dict[str, Any] = {"api_key": lease["key"], "max_retries": 0}
        return Player(
            lease, http, AsyncOpenAI(base_url=f"{url}/v1", **clients), AsyncAnthropic(base_url=url, **clients)
        )

    async def next_entry(self, stream: str, message: Callable[[bytes], Any], timeout_s: float = 20.0) -> Any:
        async with asyncio.timeout(timeout_s):
            while not (entries := await stream_entries(self.redis, stream)):
                await asyncio.sleep(0.05)
        entry, fields = entries[0]
        await self.redis.xdel(stream, entry)
        return message(fields[b"d"])

    async def rollout(self) -> Rollout:
        """The next one; the learner takes it."""
        rollout: Rollout = await self.next_entry(self.keys.rollouts, Rollout.FromString)
        whole = Rollout.FromString(rollout.SerializeToString())
        whole.num_rollouts = self.gateway.service.config.algorithm.num_return_sequences_in_group
        scored = ScoredRollout(rollout=whole, score=Score(reward=1.0))
        rollout_limits(self.gateway.service.config).check(scored)
        assert row_from_scored(scored).num_sampled == rollout.mask.count(1)
        return rollout


def branches(rollout: Rollout) -> list[tuple[list[int], list[int], list[int]]]:
    """The branches of a rollout: their tokens with the context, mask, and places in the rollout's arrays."""
    bounds = [0, *rollout.branch_starts, len(rollout.token_ids)]
    prompt = list(rollout.prompt.token_ids)
    parts = []
    for number, (first, last) in enumerate(pairwise(bounds)):
        before = [] if number else prompt
        tokens = [*before, *rollout.token_ids[first:last]]
        mask = [*[0] * len(before), *rollout.mask[first:last]]
        parts.append((tokens, mask, [*[-1] * len(before), *range(first, last)]))
    return parts


def assert_log_probs(rollout: Rollout, folders: dict[int, Path], temperature: float = TEMPERATURE) -> None:
    """Every token of the policy has the log-prob of the version that it names, behind the tokens of its branch."""
    references = {version: Reference.load(folder) for version, folder in folders.items()}
    for tokens, mask, places in branches(rollout):
        logp = {v: reference.logp(tokens[:1], tokens[1:], temperature) for v, reference in references.items()}
        sampled = [place for place, counts in enumerate(mask) if counts]
        assert sampled
        for place in sampled:
            at = places[place]
            expected = logp[rollout.version[at]][place - 1]
            assert abs(rollout.logp[at] - expected) < 1e-3, (place, rollout.logp[at], expected)
    context = [at for at, counts in enumerate(rollout.mask) if not counts]
    assert {(rollout.version[at], rollout.logp[at]) for at in context} <= {(-1, 0.0)}


@asynccontextmanager
async def started_run(
    generator: SharedEngine, redis_url: str, folder: Path, **sections: Any
) -> AsyncIterator[AgentRun]:
    keys: dict[str, Any] = {"agent": AGENT, "algorithm": LENGTHS, "reward": {"functions": []}} | sections
    async with started_gateway(generator, redis_url, folder, num_generators=1, **keys) as gateway:
        yield AgentRun(gateway)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def run(
    generator: SharedEngine, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AgentRun]:
    async with started_run(generator, redis_url, tmp_path_factory.mktemp("run")) as started:
        yield started


async def test_a_conversation_is_one_branch_with_every_token_as_it_was_sampled(run: AgentRun) -> None:
    task = await run.issue()
    worker = await run.lease()
    assert (worker.lease["messages"], worker.lease["columns"]) == ([FIRST], {"answer": "3"})
    history: list[Any] = [FIRST]
    for number in range(3):
        history.append(await worker.chat(*history))
        history.append({"role": "user", "content": f"Go on, {number}."})
    await worker.finish(0.25)
    rollout = await run.rollout()
    assert (rollout.group, rollout.number, rollout.num_turns) == (task.group, 0, 3)
    assert rollout.temperature == pytest.approx(TEMPERATURE)
    assert rollout.episode.reward == 0.25
    assert not rollout.branch_starts
    ((tokens, _, _),) = branches(rollout)
    text = TOKENIZER.apply_chat_template(history[:-1], tokenize=False)
    assert TOKENIZER.decode(tokens, skip_special_tokens=True) == TOKENIZER.decode(
        TOKENIZER.encode(text), skip_special_tokens=True
    ).removesuffix("\n")
    assert json.loads(rollout.episode.turns_json) == history[1:-1]
    assert rollout.text == history[-2]["content"]
    assert_log_probs(rollout, {run.gateway.shared.engine.version: run.gateway.shared.folder})


async def test_an_end_that_the_policy_did_not_sample_is_context(run: AgentRun) -> None:
    end, ends = TOKENIZER.convert_tokens_to_ids("<|im_end|>"), set()
    for _ in range(20):
        await run.issue()
        worker = await run.lease()
        short = await worker.chat(FIRST, max_tokens=2)
        await worker.chat(FIRST, short, {"role": "user", "content": "More."}, max_tokens=2)
        await worker.finish()
        rollout = await run.rollout()
        assert not rollout.branch_starts
        num = bytes(rollout.mask).index(b"\0")
        is_sampled = rollout.token_ids[num - 1] == end
        # The template's end of a turn, behind an answer that was cut off; then a line break, once in either case.
        assert (rollout.token_ids[num] == end) != is_sampled
        assert TOKENIZER.decode(list(rollout.token_ids[num + (not is_sampled) :])).startswith(
            "\n<|im_start|>user\nMore."
        )
        ends.add(is_sampled)
        if len(ends) == 2:
            return
    assert False in ends


async def test_every_api_continues_what_another_one_began(run: AgentRun) -> None:
    await run.issue()
    worker = await run.lease()
    first = await worker.chat(FIRST)
    then: Any = {"role": "user", "content": "And now?"}
    message = await worker.anthropic.messages.create(model="policy", max_tokens=20, messages=[FIRST, first, then])
    text = "".join(block.text for block in message.content if block.type == "text")
    second: Any = {"role": "assistant", "content": text}
    async with worker.anthropic.messages.stream(
        model="policy", max_tokens=20, messages=[FIRST, first, then, second, then]
    ) as stream:
        third: Any = {"role": "assistant", "content": "".join([part async for part in stream.text_stream])}
    history: list[Any] = [FIRST, first, then, second, then, third, then]
    response = await worker.openai.responses.create(model="policy", input=history, max_output_tokens=20)
    chunks = await worker.openai.chat.completions.create(
        model="policy",
        messages=[*history, {"role": "assistant", "content": response.output_text}, then],
        stream=True,
        max_tokens=10,
    )
    assert [chunk async for chunk in chunks]
    await worker.finish()
    rollout = await run.rollout()
    assert rollout.num_turns == 5
    assert not rollout.branch_starts
    assert_log_probs(rollout, {run.gateway.shared.engine.version: run.gateway.shared.folder})


async def test_a_rewritten_history_is_a_branch_and_every_token_is_trained_once(run: AgentRun) -> None:
    await run.issue()
    worker = await run.lease()
    first = await worker.chat(FIRST)
    then = {"role": "user", "content": "Again."}
    second = await worker.chat(FIRST, first, then)
    # A summary in place of the history, another answer to the first question, and a sub-agent with its own task.
    await worker.chat({"role": "user", "content": "Summary: nothing."}, max_tokens=8)
    await worker.chat(FIRST, first, {"role": "user", "content": "Otherwise?"}, max_tokens=8)
    await worker.chat(FIRST, {"role": "assistant", "content": "rewritten"}, then, max_tokens=8)
    await worker.finish()
    rollout = await run.rollout()
    assert (rollout.num_turns, len(rollout.branch_starts)) == (5, 3)
    texts = [TOKENIZER.decode(tokens, skip_special_tokens=True) for tokens, _, _ in branches(rollout)]
    # The conversation of the last request comes first.
    assert "rewritten" in texts[0]
    assert second["content"] in texts[1]
    assert "Summary" in texts[2]
    assert first["content"] in texts[3]
    # The turn that two branches share counts in the first alone: here the last request's answer counts, and no more.
    sampled = branches(rollout)[3][1]
    assert 0 < sum(sampled) <= 8
    assert all(sampled[-sum(sampled) :])
    assert_log_probs(rollout, {run.gateway.shared.engine.version: run.gateway.shared.folder})


async def test_parallel_requests_and_cancelled_ones(run: AgentRun) -> None:
    await run.issue()
    worker = await run.lease()
    await asyncio.gather(*(worker.chat(FIRST, max_tokens=10 + number) for number in range(3)))
    stream = await worker.openai.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "Never read."}], stream=True, max_tokens=40
    )
    await stream.close()
    await worker.finish()
    rollout = await run.rollout()
    assert rollout.num_turns == 3
    assert len(rollout.branch_starts) == 2
    assert not any("Never" in TOKENIZER.decode(tokens) for tokens, _, _ in branches(rollout))
    assert_log_probs(rollout, {run.gateway.shared.engine.version: run.gateway.shared.folder})


async def test_a_stop_string_ends_the_recorded_answer_at_its_token(run: AgentRun) -> None:
    await run.issue(4)  # of five answers, one ends before a stop string
    for _ in range(4):
        worker = await run.lease()
        answer = await worker.chat(FIRST, stop=list("etao"))
        await worker.chat(FIRST, answer, {"role": "user", "content": "On."}, max_tokens=4)
        await worker.finish()
        rollout = await run.rollout()
        assert not rollout.branch_starts
        (first_turn, *_) = bytes(rollout.mask).split(b"\x00")
        assert TOKENIZER.decode(list(rollout.token_ids[: len(first_turn)]), skip_special_tokens=True)[:-1] in (
            answer["content"],
            answer["content"][:-1],
        )
        assert_log_probs(rollout, {run.gateway.shared.engine.version: run.gateway.shared.folder})


async def test_a_weight_update_in_an_answer(run: AgentRun, tmp_path: Path) -> None:
    shared = run.gateway.shared
    before, old = shared.engine.version, shared.folder
    await run.issue()
    worker = await run.lease()
    answers = [asyncio.create_task(worker.chat({"role": "user", "content": f"{n}?"})) for n in range(3)]
    async with asyncio.timeout(60):
        while not shared.engine.num_running:
            await asyncio.sleep(0.001)
    folder = make_tiny_model(tmp_path / "new", seed=40 + before, scale=4.0)
    stage(shared.copies, folder)
    await shared.engine.load(before + 1, shared.copies, on_update="recompute", timeout_s=60)
    shared.folders.append(folder)
    await asyncio.gather(*answers)
    await worker.chat({"role": "user", "content": "After."})
    await worker.finish()
    rollout = await run.rollout()
    assert {*rollout.version} - {-1} == {before, before + 1}
    assert_log_probs(rollout, {before: old, before + 1: folder})


async def test_a_worker_that_is_silent_loses_its_rollout_and_writes_nothing_more(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    async with started_run(generator, redis_url, tmp_path / "run", agent={**AGENT, "lease_s": 4.0}) as run:
        await run.issue()
        lost = await run.lease()
        await lost.chat({"role": "user", "content": "Lost."}, max_tokens=4)
        again = await run.lease()  # waits for the end of the lease
        assert (again.lease["id"], again.lease["attempt"]) == (lost.lease["id"], 2)
        with pytest.raises(openai.AuthenticationError, match="its lease has ended"):
            await lost.chat(FIRST)
        assert (await lost.post("finish", {"reward": 0.0})).status_code == 410
        for _ in range(12):  # heartbeats keep a lease beyond its length
            await asyncio.sleep(0.5)
            assert (await again.post("heartbeat")).status_code == 204
        await again.chat(FIRST, max_tokens=4)
        await again.finish()
        await again.finish()  # the reply to the first may have been lost
        rollout = await run.rollout()
        await again.finish()  # also after the rollout was written
        assert (await again.post("finish", {"reward": 0.5})).status_code == 410
        assert rollout.num_turns == 1
        assert "Lost" not in TOKENIZER.decode(list(rollout.prompt.token_ids))


async def test_a_rollout_that_no_worker_finishes_settles_its_group(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    sections = {"agent": {**AGENT, "lease_s": 0.3}, "staleness": {"max_attempts": 2}}
    async with started_run(generator, redis_url, tmp_path / "run", **sections) as run:
        task = await run.issue()
        for attempt in (1, 2):
            assert (await run.lease()).lease["attempt"] == attempt
        scored = await run.next_entry(run.keys.scored, Scored.FromString)
        assert scored.failure.group == task.group
        assert "2 workers" in scored.failure.reason


async def test_a_gateway_opens_no_more_rollouts_than_it_may(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    """Whole groups of four: with one rollout open, another group would be too many."""
    sections = {"agent": {**AGENT, "max_rollouts": 4}}
    async with started_run(generator, redis_url, tmp_path / "run", **sections) as run:
        await run.issue()
        await run.issue()
        first = await run.lease()
        asked = await first.http.post("/v1/tasks/lease", json={"worker": "w", "wait_s": 0.6}, headers=run.token)
        assert asked.status_code == 204
        await first.chat(FIRST, max_tokens=2)
        await first.finish()
        assert (await run.lease()).lease["id"] != first.lease["id"]


async def test_failures_of_agents_have_no_score(run: AgentRun) -> None:
    for body, kind in (({"failure": "no disk"}, "agent_failed"), ({"reward": 1.0}, "no_turn")):
        await run.issue()
        worker = await run.lease()
        assert (await worker.post("finish", body)).status_code == 204
        rollout = await run.rollout()
        assert rollout.episode.failure_kind == kind


async def test_limits_and_wrong_calls_get_errors_of_the_clients_form(run: AgentRun) -> None:
    await run.issue()
    worker = await run.lease()
    with pytest.raises(openai.BadRequestError, match="at most 128"):
        await worker.chat({"role": "user", "content": "x" * 200})
    with pytest.raises(openai.BadRequestError, match="frequency_penalty is not supported"):
        await worker.chat(FIRST, frequency_penalty=0.5)
    with pytest.raises(openai.BadRequestError, match="Finish the task"):
        for number in range(30):
            await worker.chat({"role": "user", "content": f"{number}"}, max_tokens=30)
    assert (await worker.post("finish", {})).status_code == 422
    assert (await worker.post("finish", {"reward": float(1), "extra": 1})).status_code == 400
    other = {**worker.lease, "id": "999-0"}
    assert (await Player(other, worker.http, worker.openai, worker.anthropic).post("heartbeat")).status_code == 403
    for key in ("none", "wrong", worker.lease["key"], "agent-1-0.wrong"):
        headers = {"authorization": f"Bearer {key}"}
        lease = await worker.http.post("/v1/tasks/lease", json={"worker": "w"}, headers=headers)
        assert lease.status_code == 401
    assert (await worker.post("finish", {"reward": 1.0}, key=f"agent-{worker.lease['id']}.wrong")).status_code == 410
    await worker.finish()
    rollout = await run.rollout()
    assert len(rollout.prompt.token_ids) + len(rollout.token_ids) <= LENGTHS["rollout_length"]
    with pytest.raises(openai.AuthenticationError):
        await worker.chat(FIRST)


async def test_a_template_that_hides_thoughts_begins_a_branch(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    """The policy would see its thoughts where a user's own server would not show them."""
    folder = Path(shutil.copytree(generator.folder, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    hides = "message['content'][:2] if message['role'] == 'assistant' else message['content']"
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", f"({hides})")
    tokenizer.save_pretrained(folder)
    async with started_run(generator, redis_url, tmp_path / "run", model=folder) as run:
        first = {"content": ""}
        while len(first["content"]) < 8:  # one answer in fifty ends at once, and then there is nothing to hide
            await run.issue()
            worker = await run.lease()
            first = await worker.chat(FIRST, max_tokens=12)
            await worker.chat(FIRST, first, {"role": "user", "content": "So?"}, max_tokens=4)
            await worker.finish()
            rollout = await run.rollout()
    assert len(rollout.branch_starts) == 1
    assert first["content"] not in TOKENIZER.decode(branches(rollout)[0][0], skip_special_tokens=True)
    assert_log_probs(rollout, {generator.engine.version: generator.folder})


def model_that_shows_calls(source: Path, folder: Path) -> Path:
    """A copy of a model whose chat template shows the calls of answers."""
    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    calls = "{% for c in message['tool_calls'] or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content'] + '<|im_end|>", "(message['content'] or '') }}" + calls + "{{ '<|im_end|>"
    )
    tokenizer.save_pretrained(folder)
    return folder


async def test_a_tool_call_comes_back_in_the_clients_form_and_continues(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    """The policy's own text of a call, with its spaces, stays; clients of two APIs send the call as an object."""
    text_of_call = '<tool_call>\n{"name":  "add", "arguments": {"b": 22,   "a": 1}}\n</tool_call>'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tool: Any = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": schema}}
    folder = model_that_shows_calls(generator.folder, tmp_path / "model")
    speaking = replace(generator, engine=SpeakingEngine(text_of_call))  # type: ignore[arg-type]
    sections: dict[str, Any] = {"gateway": {"tool_parser": "hermes"}, "agent": {**AGENT, "answer_tokens": 120}}
    async with started_run(speaking, redis_url, tmp_path / "run", model=folder, **sections) as run:
        await run.issue()
        worker = await run.lease()
        reply = await worker.openai.chat.completions.create(model="policy", messages=[FIRST], tools=[tool])
        message = reply.choices[0].message
        (call,) = message.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "23"}
        history: list[Any] = [FIRST, message.model_dump(exclude_none=True), result]
        await worker.openai.chat.completions.create(model="policy", messages=history, tools=[tool])
        await worker.finish()
        rollout = await run.rollout()
        assert (rollout.num_turns, len(rollout.branch_starts)) == (2, 0)
        assert TOKENIZER.decode(list(rollout.token_ids)).count(text_of_call) == 2
        await run.issue()
        worker = await run.lease()
        asked: Any = {
            "model": "policy",
            "max_tokens": 120,
            "tools": [{"name": "add", "description": "adds", "input_schema": schema}],
        }
        first = await worker.anthropic.messages.create(messages=[FIRST], **asked)
        (block,) = [block for block in first.content if block.type == "tool_use"]
        answer: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "23"}]}
        content: Any = [block.model_dump(exclude_none=True) for block in first.content]
        await worker.anthropic.messages.create(
            messages=[FIRST, {"role": "assistant", "content": content}, answer], **asked
        )
        await worker.finish()
        rollout = await run.rollout()
    assert (rollout.num_turns, len(rollout.branch_starts)) == (2, 0)
    assert TOKENIZER.decode(list(rollout.token_ids)).count(text_of_call) == 2


async def test_the_template_has_the_variables_of_the_task(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(generator.folder, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ mood }}" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    async with started_run(generator, redis_url, tmp_path / "run", model=folder) as run:
        prompt = Prompt(token_ids=[5], text="p", messages_json=json.dumps([FIRST]), columns_json="{}")
        prompt.template_json = '{"mood": "fine", "tools": [{"name": "unused"}]}'
        await run.issue(prompt=prompt)
        worker = await run.lease()
        await worker.chat(FIRST, max_tokens=4)
        await worker.chat(FIRST, max_tokens=4, extra_body={"chat_template_kwargs": {"mood": "sad"}})
        await worker.finish()
        rollout = await run.rollout()
    shown = {TOKENIZER.decode(tokens).split("<")[0] for tokens, _, _ in branches(rollout)}
    assert shown == {"fine", "sad"}


BAD_CALLS = {
    "no arguments": '<tool_call>\n{"name": "add"}\n</tool_call>',
    "arguments first": '<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>',
    "arguments as text": '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>',
    "no JSON": '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>',
}


@pytest.mark.parametrize("text", BAD_CALLS.values(), ids=BAD_CALLS)
async def test_calls_that_are_written_badly_continue(
    generator: SharedEngine, redis_url: str, tmp_path: Path, text: str
) -> None:
    """Streamed and whole, in both APIs: the conversation has one branch, and no answer of the policy is an error."""
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    speaking = replace(generator, engine=SpeakingEngine(text))  # type: ignore[arg-type]
    sections: dict[str, Any] = {"gateway": {"tool_parser": "hermes"}, "agent": {**AGENT, "answer_tokens": 120}}
    folder = model_that_shows_calls(generator.folder, tmp_path / "model")
    async with started_run(speaking, redis_url, tmp_path / "run", model=folder, **sections) as run:
        asked: Any = {"model": "policy", "tools": [tool]}
        read = []
        for is_streamed in (False, True):
            await run.issue()
            worker = await run.lease()
            chat = worker.openai.chat.completions
            message: ChatCompletionMessage
            if is_streamed:
                async with chat.stream(messages=[FIRST], **asked) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                message = (await chat.create(messages=[FIRST], **asked)).choices[0].message
            calls: Any = message.tool_calls or []
            read.append((message.content or "", [call.function.arguments for call in calls]))
            answer = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in calls]
            history: list[Any] = [
                FIRST,
                message.model_dump(exclude_none=True),
                *(answer or [{"role": "user", "content": "So?"}]),
            ]
            await chat.create(messages=history, **asked)
            await worker.finish()
            rollout = await run.rollout()
            assert (rollout.num_turns, len(rollout.branch_starts)) == (2, 0)
        assert read[0] == read[1]
        await run.issue()
        worker = await run.lease()
        tools: Any = [{"name": "add", "input_schema": {"type": "object"}}]
        first = await worker.anthropic.messages.create(model="policy", max_tokens=120, messages=[FIRST], tools=tools)
        assert [block.type for block in first.content] == (["tool_use"] if read[0][1] else ["text"])


async def test_a_text_of_an_agent_with_tools_continues(generator: SharedEngine, redis_url: str, tmp_path: Path) -> None:
    """With tools, vLLM keeps special tokens in texts for its parsers, but for the end of the turn."""
    tool: Any = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}
    speaking = replace(generator, engine=SpeakingEngine("42"))  # type: ignore[arg-type]
    async with started_run(speaking, redis_url, tmp_path / "run", gateway={"tool_parser": "hermes"}) as run:
        await run.issue()
        worker = await run.lease()
        first = await worker.chat(FIRST, tools=[tool])
        await worker.chat(FIRST, first, {"role": "user", "content": "Sure?"}, tools=[tool])
        await worker.finish()
        rollout = await run.rollout()
    assert (rollout.num_turns, len(rollout.branch_starts), rollout.text) == (2, 0, "42")


async def test_another_gateway_goes_on_with_a_conversation(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    """Its state is in Redis: a gateway may end between two requests, or another one may take the next."""
    async with started_run(generator, redis_url, tmp_path / "run") as run, AsyncExitStack() as stack:
        other = await stack.enter_async_context(run.gateway.another("gateway-1"))
        await run.issue(num_rollouts=2)
        workers = [await run.lease(), await run.lease(other)]
        for worker in workers:
            first = await worker.chat(FIRST, max_tokens=6)
            url = f"http://{run.gateway.address if worker is workers[1] else other}/v1"
            elsewhere = AsyncOpenAI(base_url=url, api_key=worker.lease["key"], max_retries=0)
            history = [FIRST, first, {"role": "user", "content": "On."}]
            await elsewhere.chat.completions.create(model="policy", messages=history, max_tokens=6)
            await worker.finish()
        rollouts = [await run.rollout(), await run.rollout()]
    assert {rollout.number for rollout in rollouts} == {0, 1}
    for rollout in rollouts:
        assert (rollout.num_turns, len(rollout.branch_starts)) == (2, 0)
        assert_log_probs(rollout, {generator.engine.version: generator.folder})
    assert np.unique([rollout.group for rollout in rollouts]).size == 1


async def test_a_worker_plays_until_the_run_ends(generator: SharedEngine, redis_url: str, tmp_path: Path) -> None:
    played: list[Task] = []

    async def agent(task: Task) -> float:
        played.append(task)
        number = len(played)
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            await client.chat.completions.create(model=task.model, messages=cast(Any, task.messages), max_tokens=4)
        if number == 1:
            raise ValueError("no luck")
        if number == 2:
            await asyncio.sleep(60)
        return 0.5

    async with started_run(generator, redis_url, tmp_path / "run", agent={**AGENT, "timeout_s": 3.0}) as run:
        url, token = f"http://{run.gateway.address}", run.gateway.service.options.token
        worker = AgentWorker(agent, url, token, rollouts=2)
        working = asyncio.create_task(worker.run())
        for _ in range(4):
            await run.issue()
        rollouts = [await run.rollout() for _ in range(4)]
        run.gateway.service.stopping.set()
        async with asyncio.timeout(20):
            await working
        with pytest.raises(ExceptionGroup) as refused:
            await AgentWorker(agent, url, "another-token-of-the-same-length", patience_s=1).run()
        assert "401" in str(refused.value.exceptions[0])
    kinds = sorted(rollout.episode.failure_kind for rollout in rollouts)
    assert kinds == ["", "", "exception", "timeout"]
    assert {rollout.generator for rollout in rollouts} == {worker.name}
    assert worker.counts == {"finished": 2, "failed": 2, "lost": 0}
    assert played[0].columns == {"answer": "3"}
    with pytest.raises(ExceptionGroup) as away:
        await AgentWorker(agent, url, token, patience_s=0.1).run()
    assert isinstance(away.value.exceptions[0], RunUnreachableError)


class MuteError(Exception):
    """It cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError


# Results and exceptions of an agent, with the kind of failure; it is empty if there is a reward.
GIVEN = [
    (ValueError("\ud83d"), "exception"),
    (MuteError(), "exception"),
    (SystemExit(3), "exception"),
    (RecursionError("\x00\x1b"), "exception"),
    (AgentFailedError("nosuch", "\ud800" * 5000), "agent_failed"),
    (AgentFailedError([], ""), "agent_failed"),  # type: ignore[arg-type]
    (AgentFailedError("memory", "it had too much"), "memory"),
    (float("nan"), "invalid_return"),
    (1e308, "invalid_return"),
    (10**400, "invalid_return"),
    ("1", "invalid_return"),
    ([[]], "invalid_return"),
    (None, "invalid_return"),  # the gateway refuses it: this run's agents reward
    (True, ""),
    (1e30, ""),
]


async def test_whatever_an_agent_gives_ends_its_own_rollout_alone(run: AgentRun) -> None:
    results = iter(GIVEN)
    kinds: dict[str, str] = {}

    async def agent(task: Task) -> Any:
        result, kinds[task.id] = next(results)
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            await client.chat.completions.create(model=task.model, messages=cast(Any, task.messages), max_tokens=2)
        if isinstance(result, BaseException):
            raise result
        return result

    worker = AgentWorker(agent, f"http://{run.gateway.address}", run.gateway.service.options.token, rollouts=4)
    working = asyncio.create_task(worker.run())
    for _ in GIVEN:
        await run.issue()
    rollouts = [await run.rollout() for _ in GIVEN]
    assert not working.done()
    worker.drain()
    await working
    assert {f"{rollout.group}-{rollout.number}": rollout.episode.failure_kind for rollout in rollouts} == kinds
    assert worker.counts == {"finished": 2, "failed": len(GIVEN) - 2, "lost": 0}
    assert set(get_args(FinishRequest.model_fields["failure_kind"].annotation)) == set(FAILURE_KINDS)
    assert LARGEST_REWARD == LARGEST_NUMBER


CHOSEN = {"agent": AGENT | {"sampling": "client"}}


async def test_the_agents_temperature_is_that_of_the_rollout(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    async with started_run(generator, redis_url, tmp_path, **CHOSEN) as run:
        await run.issue()
        worker = await run.lease()
        asked: dict[str, Any] = {"temperature": 1.7, "max_tokens": 30, "extra_body": {"seed": 3}}
        first = await worker.chat(FIRST, **asked)
        then = {"role": "user", "content": "Again."}
        message = await worker.claude(FIRST, first, then, temperature=1.7)
        with pytest.raises(openai.BadRequestError, match="not that of the rollout"):
            await worker.chat(FIRST, first, then, temperature=0.5)
        with pytest.raises(anthropic.BadRequestError, match="Set the same in every request"):
            await worker.claude(FIRST, temperature=0.5)
        assert message.usage.output_tokens
        await worker.finish()
        rollout = await run.rollout()
        assert rollout.num_turns == 2
        assert rollout.temperature == pytest.approx(1.7)
        assert_log_probs(rollout, {generator.engine.version: generator.folder}, 1.7)


async def test_what_has_no_log_probs_is_refused_and_evaluations_keep_their_temperature(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    async with started_run(generator, redis_url, tmp_path, **CHOSEN) as run:
        await run.issue()
        worker = await run.lease()
        for keys, problem in (
            ({"temperature": 0.0}, "agent.sampling: run"),
            ({"temperature": 0.005}, "temperature 0.005 is below 0.01"),
            ({"temperature": 1.0, "top_p": 0.9}, "top_p cuts the distribution"),
            ({"temperature": 1.0, "extra_body": {"top_k": 5}}, "top_k cuts the distribution"),
            ({"temperature": 1.0, "extra_body": {"min_p": 0.1}}, "min_p cuts the distribution"),
            ({"temperature": 1.0, "presence_penalty": 0.5}, "presence_penalty is not supported"),
        ):
            with pytest.raises(openai.BadRequestError, match=problem):
                await worker.chat(FIRST, **keys)
        with pytest.raises(anthropic.BadRequestError, match=r"agent\.sampling: run"):
            await worker.claude(FIRST, temperature=0.0)
        await worker.chat(FIRST, temperature=0.6, max_tokens=4)  # a refused request chooses nothing
        await worker.finish()
        assert (await run.rollout()).temperature == pytest.approx(0.6)
        task = await run.issue(evaluation="e")
        worker = await run.lease()
        await worker.chat(FIRST, temperature=0.0, max_tokens=4)
        await worker.finish()
        rollout = await run.next_entry(run.keys.eval_rollouts, Rollout.FromString)
        assert (rollout.group, rollout.temperature) == (task.group, pytest.approx(TEMPERATURE))
