"""The memory of a batch: the constants against real entries in a real Redis, and the batches that they refuse."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.model.memory_needs import (
    ANSWER,
    LEARNER_ROLLOUT,
    LEARNER_TOKEN,
    OPEN_GROUP,
    REDIS_GROUP,
    REDIS_ROLLOUT,
    REDIS_TOKEN,
    check_answers_fit,
    check_fits,
    coordinator_bytes,
    learner_bytes,
    redis_bytes,
)
from gspo.common.streams.entries import SCHEMA
from gspo.common.streams.inbox import FIELD, Delivery
from gspo.common.streams.keys import Keys, rollout_key
from gspo.common.streams.saved_states import DONE
from gspo.coordinator.evaluation.results import EvaluationResults, HeldOutAnswer
from gspo.coordinator.groups.slots import OpenGroup, Slots
from gspo.coordinator.groups.tasks import training_task
from gspo.learner.assembly.groups import Group
from gspo_proto.rollout_pb2 import Prompt, RewardUse, Rollout, Score, Scored, ScoredRollout, ScorePart

NUM, SIZE, LONG = 2000, 8, 500
# A constant is the least that was met: real entries take at least as much, and not several times as much.
TOO_LOW = 2.2


def config_of(**algorithm: int) -> Config:
    return Config.model_validate(
        {
            "name": "r",
            "model": {"path": "m"},
            "data": {"prompts": "p.jsonl"},
            "reward": {"functions": [{"path": "r.py"}]},
            "run": {"total_steps": 1},
            "evaluation": {"prompts": "e.jsonl"},
            "algorithm": {"num_return_sequences_in_group": SIZE, "num_mini_batches": 1, **algorithm},
        }
    )


def scored(number: int, num_tokens: int) -> bytes:
    """An entry of the stream `scored`: the `number`-th answer, in groups of SIZE."""
    rollout = Rollout(
        schema=SCHEMA,
        group=number // SIZE,
        number=number % SIZE,
        attempt=1,
        num_rollouts=SIZE,
        prompt=Prompt(token_ids=[7, 8, 9], text="1+2=", columns_json='{"answer": "3"}'),
        token_ids=[100_000] * num_tokens,
        logp=[-0.5] * num_tokens,
        version=[3] * num_tokens,
        mask=b"\1" * num_tokens,
        text="a" * num_tokens,
        rewards=[RewardUse(name="reward", weight=1.0)],
        generator="generation-0",
        issued_unix_s=1.0,
        temperature=1.0,
    )
    score = Score(reward=1.0, parts=[ScorePart(name="reward", value=1.0, weight=1.0, version="9f86d081")], scorer="s")
    return Scored(schema=SCHEMA, rollout=ScoredRollout(rollout=rollout, score=score)).SerializeToString()


def python_bytes(make: Callable[[], object]) -> int:
    """The memory that Python has more of while the result of `make` is there."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = make()
        held, _ = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return held


def assert_near(constant: int, measured: float) -> None:
    assert constant <= measured <= TOO_LOW * constant


def test_the_coordinators_tables() -> None:
    def open_groups() -> Slots:
        slots = Slots(NUM, NUM)
        for group in range(NUM):
            slots.open[group] = OpenGroup(1, time.time(), time.time(), 0)
        return slots

    assert_near(OPEN_GROUP, python_bytes(open_groups) / NUM)

    def answers() -> EvaluationResults:
        tally = EvaluationResults("e", 1, NUM, config_of().evaluation)
        tally._answers = {(2 * row, 0): HeldOutAnswer(0.5, row, truncated=False) for row in range(NUM)}
        return tally

    assert python_bytes(answers) / NUM >= ANSWER


@pytest.mark.asyncio(loop_scope="function")
async def test_the_entries_in_redis(redis: Redis, keys: Keys) -> None:
    async def used() -> int:
        sizes = [
            await redis.memory_usage(key, samples=0) for key in (keys.prompts, keys.open, keys.scored, keys.partial)
        ]
        return sum(size or 0 for size in sizes)

    async def put(num_tokens: int, base: int) -> None:
        for number in range(NUM):
            await redis.xadd(keys.scored, {FIELD: scored(number, num_tokens)})
            await redis.hset(keys.partial, rollout_key(base + number // SIZE, number % SIZE), DONE)

    before = await used()
    config = config_of()
    task = training_task(config, config.sources[0], 0, Prompt(token_ids=[7, 8, 9], text="1+2="))
    entry = OpenGroup(1, time.time(), time.time(), 0).to_json()
    for group in range(NUM):
        await redis.xadd(keys.prompts, {FIELD: task.SerializeToString()})
        await redis.hset(keys.open, str(group), entry)
    tasks = await used()
    assert_near(REDIS_GROUP, (tasks - before) / NUM)
    await put(1, 0)
    short = await used()
    assert_near(REDIS_ROLLOUT, (short - tasks) / NUM)
    await put(1 + LONG, NUM)
    assert_near(REDIS_TOKEN, ((await used() - short) - (short - tasks)) / NUM / LONG)


def test_the_learners_rollouts() -> None:
    algorithm = config_of().algorithm

    def held(num_tokens: int) -> Any:
        groups = [Group(number, algorithm) for number in range(NUM // SIZE)]
        entries = []
        for number in range(NUM):
            groups[number // SIZE].add(Scored.FromString(scored(number, num_tokens)).rollout)
            entries.append(Delivery(b"%d-0" % number, b"", 1))
        return groups, entries

    short = python_bytes(lambda: held(1)) / NUM
    assert_near(LEARNER_ROLLOUT, short)
    assert_near(LEARNER_TOKEN, (python_bytes(lambda: held(1 + LONG)) / NUM - short) / LONG)


@pytest.mark.parametrize("needed", [coordinator_bytes, redis_bytes, learner_bytes])
def test_a_batch_beyond_memory_is_refused(needed: Any) -> None:
    config = config_of(rollout_batch_size=1_000_000_000)
    with pytest.raises(InputError, match="1000000000 groups of 8 answers, with 2000000000 open") as error:
        check_fits(config, needed(config), 64 << 30, "the memory")
    assert error.value.where == "algorithm.rollout_batch_size"
    largest = int(error.value.fix.split("below ")[1].split(",")[0])
    fits = config_of(rollout_batch_size=largest // 100 * 99)
    assert needed(fits).least <= 64 << 30 < needed(config_of(rollout_batch_size=largest // 100 * 101)).least
    small = config_of()
    assert check_fits(small, needed(small), 64 << 30, "the memory") == ""


def test_answers_that_may_not_fit_are_a_warning() -> None:
    """1,024 open answers of up to a million tokens: 12.3 GB of a learner that has 4 GiB."""
    config = config_of(response_length=1_000_000)
    warning = check_fits(config, learner_bytes(config), 4 << 30, "the learner's memory")
    assert warning.startswith("algorithm.response_length: if every answer took all 1000000 tokens, the 128 open groups")
    assert "11.4 GiB of the learner's memory, and 4.0 GiB are free" in warning


def test_an_evaluation_that_cannot_be_counted_is_refused() -> None:
    config = config_of()
    check_answers_fit(config, 1000, 1 << 30, "the memory")
    wanted = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"num_answers": 10**9})})
    with pytest.raises(InputError, match="1000000000 answers to each of 1000 held-out prompts") as error:
        check_answers_fit(wanted, 1000, 1 << 30, "the memory")
    assert error.value.where == "evaluation.num_answers"
