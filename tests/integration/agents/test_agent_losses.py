"""Fifty agents at once while generators, gateways and workers are lost and weights change: what the run then has.

Every token has the log-prob of the version that it names, no rollout comes twice, none is lost, and each is handed out
a bounded number of times. With a simulated engine, whose log-probs follow from token, place and weights; and with
vLLM, fewer agents and fewer losses. Not here: processes that are killed (tests/chaos/test_agent_faults.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulated.answers import key_of, log_probs
from benchmarks.simulated.engine import SimulatedEngine
from benchmarks.simulated.settings import Settings
from gspo.generation.engine.staging import PolicyCopies
from gspo_proto.rollout_pb2 import Rollout
from tests.integration.generation.conftest import SharedEngine, running_engine
from tests.integration.generation.test_agents import AgentRun, assert_log_probs, branches, started_run
from tests.support.agents.lossy_processes import AGENTS, lossy_processes
from tests.support.agents.restless_agent import RestlessAgent
from tests.support.agents.sampled_texts import sampled_texts
from tests.support.started_gateway import TOKENIZER
from tests.support.tiny_model import make_tiny_model
from tests.support.weights import stage

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
MAX_ATTEMPTS = 8
GROUPS = 13
SECTIONS = {
    "agent": {"external": True, "lease_s": 60.0, "max_rollouts": 32},
    "algorithm": {"prompt_length": 128, "response_length": 768, "rollout_length": 4096},
    "services": {"lease_s": 15.0},
    "staleness": {"max_attempts": MAX_ATTEMPTS},
    "reward": {"functions": []},
}
STRIKES = ("gateway", "generator", "worker", "generator", "gateway", "worker")
SPEED = Settings(decode_s=0.02, decode_s_per_request=2e-4, length_median=12, length_sigma=0.6, load_s=0.02)


async def play(
    run: AgentRun,
    agent: RestlessAgent,
    redis_url: str,
    num_groups: int,
    num_agents: int,
    push: Callable[[], Awaitable[None]],
) -> list[Rollout]:
    """Issue groups of four, strike and push until all rollouts are there; the rollouts."""
    tasks = [await run.issue(num_rollouts=4) for _ in range(num_groups)]
    service, rollouts = run.gateway.service, list[Rollout]()
    async with lossy_processes(service, run.gateway.shared, redis_url, agent, num_agents, 4) as processes:
        strikes, deadline = list(STRIKES), time.monotonic() + 300
        while len(rollouts) < 4 * num_groups or strikes:
            assert time.monotonic() < deadline, f"{len(rollouts)} of {4 * num_groups} rollouts, {strikes} to come"
            await push()
            if strikes and len(rollouts) >= (len(STRIKES) - len(strikes)) * 4 * num_groups // 8:
                await processes.lose(strikes.pop(0))
            await asyncio.sleep(0.5)
            for _ in range(await run.redis.xlen(run.keys.rollouts)):
                rollouts.append(await run.rollout())
        assert await run.redis.xlen(run.keys.scored) == 0, "a group was given up"
        async with asyncio.timeout(20):
            while await run.redis.xlen(run.keys.prompts):
                await asyncio.sleep(0.1)
        assert await run.redis.xlen(run.keys.rollouts) == 0, "a rollout came twice"
        assert processes.num_lost == Counter(STRIKES)
    assert {task.group for task in tasks} == {rollout.group for rollout in rollouts}
    return rollouts


def check(rollouts: list[Rollout], agent: RestlessAgent) -> None:
    """Each rollout once, of an attempt that ended, with every answer that its agent read and no other's."""
    names = Counter((rollout.group, rollout.number) for rollout in rollouts)
    assert set(names.values()) == {1}
    assert max(map(max, agent.attempts.values())) <= MAX_ATTEMPTS
    for rollout in rollouts:
        assert not rollout.episode.failure, rollout.episode.failure
        played = agent.played[rollout.episode.reward]
        assert played.id == f"{rollout.group}-{rollout.number}"
        sampled = Counter(sampled_texts(rollout.token_ids, rollout.mask, rollout.branch_starts))
        answers = Counter(text.strip() for text in played.answers)
        assert not answers - sampled, (played, sampled)
        # An answer that was sampled to its end before its request was cancelled or its reply lost is one more.
        assert sum((sampled - answers).values()) <= played.num_unread


@pytest.mark.long
async def test_fifty_agents_under_losses_and_updates(redis_url: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", seed=3)
    copies = PolicyCopies.from_folder(folder, "float32")
    keys = {0: key_of(copies, copies.serving)}
    engine = SimulatedEngine(
        SPEED, max_num_seqs=128, vocabulary=len(TOKENIZER), eos=TOKENIZER.eos_token_id, key=keys[0]
    )
    shared, agent = SharedEngine(engine, copies, [folder]), RestlessAgent()  # type: ignore[arg-type]

    async def push() -> None:
        copies.begin(changes=True)
        name = min(copies.places)
        copies.write(name, 0, (copies.serving.bits(name)[:1] + 1).tobytes())
        await engine.load(engine.version + 1, copies, on_update="recompute", timeout_s=10)
        keys[engine.version] = key_of(copies, copies.serving)

    async with started_run(shared, redis_url, tmp_path / "run", **SECTIONS) as run:
        rollouts = await play(run, agent, redis_url, GROUPS, AGENTS, push)
    await engine.stop()
    copies.close()
    check(rollouts, agent)
    for rollout in rollouts:
        version_T, logp_T = np.array(rollout.version), np.array(rollout.logp, np.float32)
        for number, (tokens, _, places) in enumerate(branches(rollout)):
            first = len(tokens) - len([place for place in places if place >= 0])
            place_T = np.array(places[first:])
            for version in set(version_T[place_T].tolist()) - {-1}:
                expected_T = log_probs(tokens[first:], first, keys[version])
                is_of = version_T[place_T] == version
                assert np.array_equal(expected_T[is_of], logp_T[place_T][is_of]), (number, version)
        assert not logp_T[version_T < 0].any()
    assert len({version for rollout in rollouts for version in rollout.version}) > 5


@pytest.mark.long
async def test_agents_of_a_real_engine_under_losses_and_updates(redis_url: str, tmp_path: Path) -> None:
    async with running_engine(tmp_path / "policy") as generator:
        rollouts, folders, agent = await _play_real(generator, redis_url, tmp_path)
    check(rollouts, agent)
    for rollout in rollouts:
        assert_log_probs(rollout, folders)


async def _play_real(
    generator: SharedEngine, redis_url: str, tmp_path: Path
) -> tuple[list[Rollout], dict[int, Path], RestlessAgent]:
    folders, agent = {generator.engine.version: generator.folder}, RestlessAgent(1)

    async def push() -> None:
        version = generator.engine.version + 1
        if version > 4:
            return
        folders[version] = make_tiny_model(tmp_path / f"v{version}", seed=version, scale=4.0)
        stage(generator.copies, folders[version])
        await generator.engine.load(version, generator.copies, on_update="recompute", timeout_s=60)
        generator.folders.append(folders[version])

    sections = {**SECTIONS, "algorithm": {"prompt_length": 128, "response_length": 384, "rollout_length": 2048}}
    async with started_run(generator, redis_url, tmp_path / "run", **sections) as run:
        return await play(run, agent, redis_url, 5, 12, push), folders, agent
