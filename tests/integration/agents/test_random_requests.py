"""Requests of an agent with random values, at each API of a gateway: they are answered or refused, and others go on.

A real engine, Redis and gateway; each case by its seed.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.integration.generation.conftest import running_engine
from tests.integration.generation.test_agents import FIRST, AgentRun, started_run
from tests.support.environments.random_answers import mangled, value

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600), pytest.mark.long]
NUM_ROUNDS, NUM_REQUESTS = 20, 150
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
FIELDS = (
    "temperature", "top_p", "stop", "tools", "tool_choice", "stream", "system", "metadata", "max_output_tokens", "n",
    "response_format", "logprobs", "seed", "stream_options", "thinking", "reasoning", "previous_response_id", "user",
)  # fmt: skip


def body(rng: random.Random, path: str) -> bytes:
    """A request that is nearly an honest one."""
    role, content, model, num = (rng.choice([text, value(rng)]) for text in ('"user"', '"Hello."', '"policy"', "2"))
    message = rng.choice([f'{{"role": {role}, "content": {content}}}', value(rng)])
    messages = rng.choice([f"[{message}]", value(rng)])
    fields = [f'"model": {model}', f'"max_tokens": {num}']
    fields.append(f'"{"input" if path == "/v1/responses" else "messages"}": {messages}')
    fields += [f'"{name}": {value(rng)}' for name in rng.sample(FIELDS, rng.choice([0, 0, 1, 2]))]
    text = "{" + ", ".join(fields) + "}"
    return mangled(rng, text) if rng.random() < 0.2 else text.encode(errors="replace")


async def play_round(run: AgentRun, rng: random.Random, statuses: Counter[int]) -> None:
    """A hostile agent beside an honest one; both finish their rollouts."""
    await run.issue(num_rollouts=2)
    hostile, honest = await run.lease(), await run.lease()
    task = f"/v1/tasks/{hostile.lease['id']}"
    headers = {"authorization": f"Bearer {hostile.lease['key']}", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=hostile.http.base_url, timeout=30, headers=headers) as http:
        for number in range(NUM_REQUESTS):
            path = rng.choice([*PATHS, f"{task}/heartbeat", f"{task}/nothing"])
            sent = body(rng, path)
            reply = await http.post(path, content=sent)
            statuses[reply.status_code] += 1
            assert reply.status_code < 500, (number, path, sent[:500], reply.text[:500])
            if number % 50 == 0:
                await honest.chat(FIRST, max_tokens=2)
        for reward in ('"1"', "true", "NaN", "1e400", "[1]", '"\\ud83d"', "1" * 5000):
            reply = await http.post(f"{task}/finish", content=f'{{"reward": {reward}}}')
            assert reply.status_code in (400, 422), (reward, reply.text)
    await hostile.finish(0.5)
    await honest.finish(0.25)
    assert {(await run.rollout()).episode.reward for _ in range(2)} == {0.25, 0.5}


async def test_random_requests_are_refused_and_others_are_answered(redis_url: str, tmp_path: Path) -> None:
    rng, statuses = random.Random(7), Counter[int]()  # noqa: S311 - a case is found again by its seed
    async with (
        running_engine(tmp_path / "policy") as generator,
        started_run(generator, redis_url, tmp_path / "run") as run,
    ):
        for _ in range(NUM_ROUNDS):
            await play_round(run, rng, statuses)
    assert statuses[200]
    assert statuses[400]
