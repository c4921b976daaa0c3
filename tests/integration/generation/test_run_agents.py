"""Agents that the run starts: the service as its own process, a real engine and gateway behind its relays.

Not here: what an agent may reach (tests/integration/agents/test_agent_sandbox.py), `gspo run` as a whole
(tests/integration/run/test_agent_example.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo.common.streams.events import Events
from gspo_proto.rollout_pb2 import RUN_END_COMPLETED, Event, Finished, Prompt
from tests.integration.generation.conftest import SharedEngine
from tests.integration.generation.test_agents import AGENT, FIRST, AgentRun, assert_log_probs, started_run
from tests.support.service_process import log_events, service_process, wait_exit

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
# By openai's package alone. A rollout that is handed out the first time may wait beside a program of its own.
AGENT_FILE = """
import asyncio, subprocess
from openai import AsyncOpenAI

async def play(task):
    print("plays", task.id, "attempt", task.attempt)
    if task.attempt == 1 and task.columns.get("waits"):
        subprocess.Popen(["setsid", "sleep", task.columns["waits"]])
        await asyncio.sleep(60)
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        history = list(task.messages)
        for _ in range(2):
            reply = await client.chat.completions.create(model=task.model, messages=history, max_tokens=6)
            history += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "More."}]
    return 0.5
"""
# It takes its time before it calls the policy.
SLOW_AGENT = """
import asyncio
from openai import AsyncOpenAI

async def play(task):
    print("plays", task.id)
    await asyncio.sleep(3)
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        await client.chat.completions.create(model=task.model, messages=task.messages, max_tokens=6)
    return 0.5
"""
# A shell with Python's standard library: addresses and keys come by the environment.
PROGRAM = """
python3 -c '
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": os.environ["GSPO_MODEL"], "messages": task["messages"], "max_tokens": 6}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
print(reply["choices"][0]["message"]["content"])
' > answer && wc -c < answer > /dev/null && echo 0.25 > "$GSPO_REWARD_FILE"
"""


@asynccontextmanager
async def playing(
    generator: SharedEngine,
    redis_url: str,
    folder: Path,
    drain_s: float = 1.0,
    sections: dict[str, Any] | None = None,
    **agent: Any,
) -> AsyncIterator[tuple[AgentRun, subprocess.Popen[bytes]]]:
    """A run with its gateway, and the service of its agents, which drains for `drain_s`."""
    keys = {**{key: value for key, value in AGENT.items() if key != "external"}, "workers": 2, **agent}
    more = {"run": {"drain_timeout_s": drain_s}, **(sections or {})}
    async with started_run(generator, redis_url, folder, agent=keys, **more) as run:
        with service_process("agents", run.gateway.service.config, redis_url, "--name", "agents-0") as process:
            yield run, process


def processes_named(argument: str) -> list[int]:
    return [process.pid for process in psutil.process_iter(["cmdline"]) if argument in (process.info["cmdline"] or ())]


async def wait_for_processes(argument: str, number: int) -> list[int]:
    async with asyncio.timeout(30):
        while len(found_pids := processes_named(argument)) != number:
            await asyncio.sleep(0.05)
    return found_pids


async def issue_waiting(run: AgentRun, seconds: str, num_rollouts: int = 1) -> None:
    """A task whose first attempt waits beside `sleep SECONDS`."""
    columns, messages = json.dumps({"waits": seconds}), json.dumps([FIRST])
    prompt = Prompt(token_ids=[5], text="p", messages_json=messages, columns_json=columns)
    await run.issue(num_rollouts, prompt=prompt)


async def test_the_runs_own_agent_plays(generator: SharedEngine, redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(AGENT_FILE)
    async with playing(generator, redis_url, tmp_path / "run", path=str(path)) as (run, process):
        for _ in range(3):
            await run.issue(num_rollouts=2)
        rollouts = [await run.rollout() for _ in range(6)]
        finished = Event(finished=Finished(reason="done", end=RUN_END_COMPLETED))
        await Events(run.redis, run.keys, "learner-0").send(finished)
        assert await asyncio.to_thread(wait_exit, process, 20) == 0
        log = log_events(run.gateway.service.config.run_dir / "agents.log")
    for rollout in rollouts:
        assert (rollout.num_turns, rollout.episode.reward, rollout.generator) == (2, 0.5, "agents-0")
        assert not rollout.branch_starts
        assert_log_probs(rollout, {generator.engine.version: generator.folder})
    printed = [line["line"] for line in log if line["event"] == "agent_output"]
    assert sorted(printed) == sorted(f"plays {rollout.group}-{rollout.number} attempt 1" for rollout in rollouts)


async def test_a_program_plays(generator: SharedEngine, redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "play.sh"
    path.write_text(PROGRAM)
    keys: dict[str, Any] = {"command": ["sh", "play.sh"], "reads": [str(path)]}
    async with playing(generator, redis_url, tmp_path / "run", **keys) as (run, _):
        await run.issue(num_rollouts=2)
        for rollout in [await run.rollout(), await run.rollout()]:
            assert (rollout.num_turns, rollout.episode.reward) == (1, 0.25)
            assert_log_probs(rollout, {generator.engine.version: generator.folder})


async def test_a_killed_worker_costs_an_attempt(generator: SharedEngine, redis_url: str, tmp_path: Path) -> None:
    """The sandbox that plays is killed: its rollout begins anew at once, though its lease would hold on."""
    path, seconds = tmp_path / "agent.py", f"{os.getpid()}.125"
    path.write_text(AGENT_FILE)
    async with playing(generator, redis_url, tmp_path / "run", path=str(path)) as (run, process):
        await issue_waiting(run, seconds)
        (pid,) = await wait_for_processes(seconds, 1)
        began = time.monotonic()
        first_of_sandbox = psutil.Process(pid)
        while first_of_sandbox.parent().pid != process.pid:  # type: ignore[union-attr]
            first_of_sandbox = first_of_sandbox.parent()  # type: ignore[assignment]
        first_of_sandbox.kill()
        rollout = await run.rollout()
        assert time.monotonic() - began < AGENT["lease_s"] / 2
        assert (rollout.episode.reward, rollout.num_turns) == (0.5, 2)
        await wait_for_processes(seconds, 0)


async def test_no_process_of_an_agent_outlives_the_service(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    """By SIGKILL, and by SIGTERM as the run's supervisor sends it; the next service plays the remaining rollouts."""
    path, seconds = tmp_path / "agent.py", f"{os.getpid()}.375"
    path.write_text(AGENT_FILE)
    async with playing(generator, redis_url, tmp_path / "run", path=str(path), lease_s=3.0) as (run, process):
        await issue_waiting(run, seconds, num_rollouts=2)
        await wait_for_processes(seconds, 2)
        process.kill()
        await wait_for_processes(seconds, 0)
        with service_process("agents", run.gateway.service.config, redis_url, "--name", "agents-0") as second:
            assert [(await run.rollout()).episode.reward for _ in range(2)] == [0.5, 0.5]
            await issue_waiting(run, seconds)
            await wait_for_processes(seconds, 1)
            second.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(wait_exit, second, 20) == 0
        await wait_for_processes(seconds, 0)


async def test_a_stopped_service_finishes_its_rollouts_and_takes_no_more(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(SLOW_AGENT)
    async with playing(generator, redis_url, tmp_path / "run", drain_s=60.0, path=str(path)) as (run, process):
        first = await run.issue(num_rollouts=2)
        log = run.gateway.service.config.run_dir / "agents.log"
        async with asyncio.timeout(30):
            while sum(line["event"] == "agent_output" for line in log_events(log)) < 2:
                await asyncio.sleep(0.05)
        await run.issue(num_rollouts=1)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(wait_exit, process, 40) == 0
        finished = [await run.rollout() for _ in range(2)]
        assert {(rollout.group, rollout.number, rollout.episode.reward) for rollout in finished} == {
            (first.group, 0, 0.5),
            (first.group, 1, 0.5),
        }
        assert not await run.redis.xlen(run.keys.rollouts)
