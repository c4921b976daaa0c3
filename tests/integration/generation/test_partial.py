"""Rollouts that are cut in two: by a generator's death, by their budget of a step, by its end, by new weights.

Loops, saves and streams are real, on a real Redis; the engine only takes time, and its log-probs follow from token,
place and weights, so every token can be checked.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from benchmarks.simulated.answers import key_of, log_probs
from benchmarks.simulated.engine import SimulatedEngine
from benchmarks.simulated.settings import Settings
from gspo.common.config.schema import Config
from gspo.common.service.app import Service
from gspo.common.streams.inbox import append
from gspo.common.streams.keys import Keys
from gspo.common.streams.token_counts import read_counts
from gspo.environments.function_environment import FunctionEnvironment
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.loop import GenerationLoop
from gspo.generation.rollout.driver import RolloutDriver
from gspo.generation.rollout.episodes import Episodes
from gspo_proto.rollout_pb2 import GroupTask, Prompt, Rollout, RolloutState, Sampling
from tests.support.push_peers import SHAPES, policy, service_of
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tokenizer
from tests.support.typed.redis_entries import payloads

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]
LENGTH, SAVE_TOKENS, PROMPT = 120, 32, [1, 4, 50, 5]
# Stand-ins for the weights of versions 0 and 1.
KEYS = {0: 7, 1: 1234}


@dataclass
class RunningLoop:
    """A generation loop with its engine."""

    service: Service
    engine: SimulatedEngine
    loop: GenerationLoop
    running: asyncio.Task[None]

    async def end(self) -> None:
        self.service.stopping.set()
        await self.running
        await self.close()

    async def kill(self) -> None:
        """As SIGKILL does: no other process learns of it."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.close()

    async def close(self) -> None:
        await self.engine.stop()
        await self.service.redis.aclose()


def configure(folder: Path, **generation: Any) -> Config:
    return make_run(
        folder,
        folder,
        algorithm={"response_length": 128},
        generation={"max_rollouts": 4, "save_tokens": SAVE_TOKENS, **generation},
        staleness={"max_lag": 8},
        services={"lease_s": 0.6},
        run={"drain_timeout_s": 0.2},
    )


def start(config: Config, redis_url: str, name: str, *, version: int = 0, decode_s: float = 0.004) -> RunningLoop:
    service = service_of(f"generation-{name}", config, redis_url)
    settings = Settings(decode_s=decode_s, decode_s_per_request=0.0, length_median=LENGTH)
    engine = SimulatedEngine(settings, max_num_seqs=4, vocabulary=90, eos=2, key=KEYS[version], version=version)
    tokenizer = make_tokenizer()
    episodes = Episodes(FunctionEnvironment(service), tokenizer)
    driver = RolloutDriver(engine, tokenizer, config.generation, episodes)
    loop = GenerationLoop(service, engine, driver)
    return RunningLoop(service, engine, loop, asyncio.create_task(loop.run()))


async def issue(redis: Redis, keys: Keys, *groups: int) -> None:
    for group in groups:
        await redis.hset(keys.open, str(group), "{}")
    await append(redis, keys.prompts, [task(group) for group in groups])


def task(group: int) -> bytes:
    prompt, sampling = Prompt(token_ids=PROMPT), Sampling(temperature=1.0, max_tokens=128)
    return GroupTask(
        schema=1, group=group, attempt=1, num_rollouts=4, prompt=prompt, sampling=sampling
    ).SerializeToString()


async def finished(redis: Redis, keys: Keys, num: int) -> list[Rollout]:
    while await redis.xlen(keys.rollouts) < num:
        await asyncio.sleep(0.01)
    while await redis.xlen(keys.prompts) + await redis.xlen(keys.paused_prompts):
        await asyncio.sleep(0.01)
    rollouts = [Rollout.FromString(payload) for payload in await payloads(redis, keys.rollouts)]
    assert len({(rollout.group, rollout.number) for rollout in rollouts}) == len(rollouts) == num
    return rollouts


def check_tokens(rollout: Rollout, keys_of: dict[int, int]) -> None:
    """Whole, and every log-prob is that of its token, place and version."""
    assert len(rollout.token_ids) == len(rollout.version) == len(rollout.mask) == LENGTH
    assert rollout.token_ids[-1] == 2
    expected = [
        log_probs([token], len(PROMPT) + place, keys_of[version])[0]
        for place, (token, version) in enumerate(zip(rollout.token_ids, rollout.version, strict=True))
    ]
    assert np.array_equal(np.array(rollout.logp, np.float32), np.array(expected))


async def sampled_at_least(generator: RunningLoop, num: int) -> dict[int, int]:
    """Tokens of each rollout once each has so many."""
    while True:
        num_sampled = {
            rollout.number: len(rollout.state.token_ids) + generator.engine.num_sampled(rollout.request_id)
            for leased in generator.loop._leased
            for rollout in leased.in_flight.values()
        }
        if len(num_sampled) == 4 and min(num_sampled.values()) >= num:
            return num_sampled
        await asyncio.sleep(0.005)


async def test_what_a_killed_generator_had_saved_goes_on_elsewhere(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = configure(tmp_path)
    dying = start(config, redis_url, "dying")
    await issue(redis, keys, 7)
    sampled = await sampled_at_least(dying, 2 * SAVE_TOKENS)
    await dying.kill()

    other = start(config, redis_url, "other", version=1)
    for rollout in await finished(redis, keys, 4):
        kept = list(rollout.version).count(0)
        assert list(rollout.version) == [0] * kept + [1] * (LENGTH - kept)
        assert 0 <= sampled[rollout.number] - kept <= SAVE_TOKENS
        assert rollout.generator == "generation-other"
        check_tokens(rollout, KEYS)
    await other.end()


async def test_rollouts_beyond_their_segment_are_paused_and_resumed(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    """Three groups, and place for one: each is sampled in segments, and none waits for the end of another."""
    config = configure(tmp_path, segment_tokens=50)
    generators = [start(config, redis_url, "one")]
    await issue(redis, keys, 0, 1, 2)
    while not await redis.hlen(keys.partial):
        await asyncio.sleep(0.005)
    # The second generator, with newer weights, resumes the rollouts that the first has paused.
    generators.append(start(config, redis_url, "two", version=1))
    rollouts = await finished(redis, keys, 12)
    for rollout in rollouts:
        check_tokens(rollout, KEYS)
    moved = [rollout for rollout in rollouts if set(rollout.version) == {0, 1} and rollout.version[49:51] == [0, 1]]
    assert moved, "no rollout was paused after its 50 tokens and resumed elsewhere"
    for generator in generators:
        await generator.end()


async def test_no_rollout_is_paused_while_no_task_waits(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    generator = start(configure(tmp_path, segment_tokens=50, save_tokens=1000), redis_url, "one")
    await issue(redis, keys, 0)
    await sampled_at_least(generator, 60)
    assert await redis.hlen(keys.partial) == 0
    for rollout in await finished(redis, keys, 4):
        check_tokens(rollout, KEYS)
    await generator.end()


async def test_a_generator_that_stops_saves_its_rollouts_and_returns_their_tasks(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    generator = start(configure(tmp_path, save_tokens=1000), redis_url, "one", decode_s=0.05)
    await issue(redis, keys, 0)
    sampled = await sampled_at_least(generator, 10)
    await generator.end()
    assert (await redis.xpending(keys.prompts, "generation"))["pending"] == 0
    assert await redis.xlen(keys.prompts) == 1
    saved: Any = await redis.hvals(keys.partial)
    states = [RolloutState.FromString(state) for state in saved]
    assert len(states) == 4
    assert all(len(state.token_ids) >= min(sampled.values()) and state.delivery == 0 for state in states)


async def test_leases_outlive_a_sleep_of_the_engine(redis: Redis, keys: Keys, redis_url: str, tmp_path: Path) -> None:
    """As in the learner's shift on shared GPUs: no other generator takes the rollouts, and they go on after it."""
    config = configure(tmp_path, save_tokens=1000)
    sleeping = start(config, redis_url, "sleeping")
    await issue(redis, keys, 7)
    await sampled_at_least(sleeping, 10)
    await sleeping.engine.sleep(on_update="recompute", timeout_s=5)
    other = start(config, redis_url, "other", version=1)
    await asyncio.sleep(4 * config.services.lease_s)
    assert (sleeping.loop.num_running, other.loop.num_running) == (4, 0)
    delivered = await redis.xpending_range(keys.prompts, "generation", "-", "+", 10)
    assert [entry["times_delivered"] for entry in delivered] == [1]
    copies = PolicyCopies(SHAPES, "bfloat16")
    copies.begin(changes=False)
    for name, bits in policy(1).bits.items():
        copies.write(name, 0, bits.tobytes())
    await sleeping.engine.wake(1, copies, timeout_s=5)
    for rollout in await finished(redis, keys, 4):
        assert rollout.generator == "generation-sleeping" and set(rollout.version) == {0, 1}
        check_tokens(rollout, {0: KEYS[0], 1: key_of(copies, copies.serving)})
    await sleeping.end()
    await other.end()
    copies.close()


async def test_new_weights_under_restart_drop_the_tokens_and_keep_the_ids(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = configure(tmp_path, on_update="restart")
    generator = start(config, redis_url, "one")
    await issue(redis, keys, 3)
    await sampled_at_least(generator, 40)
    copies = PolicyCopies(SHAPES, "bfloat16")
    copies.begin(changes=False)
    for name, bits in policy(1).bits.items():
        copies.write(name, 0, bits.tobytes())
    await generator.engine.load(1, copies, on_update="restart", timeout_s=5)
    for rollout in await finished(redis, keys, 4):
        assert set(rollout.version) == {1}
        check_tokens(rollout, {1: key_of(copies, copies.serving)})
    await generator.end()
    copies.close()


async def test_saved_tokens_of_older_weights_are_dropped_under_restart(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = configure(tmp_path, on_update="restart")
    dying = start(config, redis_url, "dying")
    await issue(redis, keys, 3)
    await sampled_at_least(dying, 2 * SAVE_TOKENS)
    await dying.kill()
    other = start(config, redis_url, "other", version=1)
    assert {version for rollout in await finished(redis, keys, 4) for version in rollout.version} == {1}
    await other.end()


async def test_the_ledger_has_every_token_of_a_rollout_that_was_cut_in_two(
    redis: Redis, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    config = configure(tmp_path, on_update="restart")
    dying = start(config, redis_url, "dying")
    await issue(redis, keys, 7)
    await sampled_at_least(dying, 2 * SAVE_TOKENS)
    await dying.kill()
    _, saved = await read_counts(redis, keys)
    assert saved["generated"] == saved["in_flight"] >= 4 * SAVE_TOKENS

    # Newer weights drop the saved tokens, and the rollouts begin anew.
    other = start(config, redis_url, "other", version=1)
    rollouts = await finished(redis, keys, 4)
    await other.end()
    _, tokens = await read_counts(redis, keys)
    assert tokens["in_flight"] == sum(len(rollout.token_ids) for rollout in rollouts) == 4 * LENGTH
    assert tokens["superseded"] == saved["generated"]
    assert tokens["generated"] == tokens["in_flight"] + tokens["superseded"]
