"""The token ledger on a real Redis: generators report, learner and coordinator count, and the difference is 0."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from gspo.common.streams.inbox import Delivery, EntryOutput, EntryState, Inbox, append, create_consumer_groups
from gspo.common.streams.keys import LEARNER, Keys
from gspo.common.streams.token_counts import EndedTokens, RolloutTokens, abandon, close, read_counts
from gspo.runlog.token_ledger import LedgerRecord
from gspo_proto.rollout_pb2 import GroupTask, Prompt, Rollout, Score, Scored, ScoredRollout

pytestmark = pytest.mark.asyncio(loop_scope="function")
LEASE_S = 0.4


def inbox(redis: Redis, keys: Keys, stream: str, consumer: str) -> Inbox:
    return Inbox(redis, keys, stream, consumer=consumer, lease_s=LEASE_S)


async def leased(redis: Redis, keys: Keys, *, evaluation: bool = False) -> tuple[Inbox, Delivery]:
    """A task under the lease of a generator."""
    await create_consumer_groups(redis, keys)
    await redis.set(keys.redis_epoch, "first")
    stream = keys.eval_prompts if evaluation else keys.prompts
    task = GroupTask(schema=1, num_rollouts=1, prompt=Prompt(token_ids=[1]), evaluation="v0" if evaluation else "")
    await append(redis, stream, [task.SerializeToString()])
    generator = inbox(redis, keys, stream, "one")
    (delivery,) = await generator.take(1, block_s=1)
    return generator, delivery


async def counts(redis: Redis, keys: Keys) -> dict[str, int]:
    """The columns that are not 0; what generators report is what the others count."""
    account, tokens = await read_counts(redis, keys)
    assert LedgerRecord(step=0, unix_s=0.0, account=account, tokens=tokens).difference == 0, tokens
    return {column: num for column, num in tokens.items() if num}


def state(delivery: Delivery, kept: int, sampled: int, reported: int) -> EntryState:
    return EntryState(delivery, "0-0", b"state", RolloutTokens(kept, sampled, reported))


def result(keys: Keys, delivery: Delivery, kept: int, sampled: int, reported: int) -> EntryOutput:
    rollout = Rollout(schema=1, num_rollouts=1, version=[0] * kept)
    scored = Scored(schema=1, rollout=ScoredRollout(rollout=rollout, score=Score(reward=1.0)))
    tokens = RolloutTokens(kept, sampled, reported)
    return EntryOutput(delivery, keys.scored, scored.SerializeToString(), "0-0", tokens)


async def acknowledge(redis: Redis, keys: Keys, column: str, num: int, *, masked: int = 0) -> None:
    learner = inbox(redis, keys, keys.scored, LEARNER)
    entries = await learner.take(10, block_s=1)
    ended = EndedTokens("0-0", column, num, "masked_stale", masked)
    for _ in range(2):  # the second call is a repetition, which finds no entry
        await learner.acknowledge([(entry, ended) for entry in entries])


async def test_a_trained_rollout(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    for _ in range(2):  # the reply of the first call may have been lost
        assert await generator.save([state(task, 20, 20, 0)]) == 1
    assert await counts(redis, keys) == {"generated": 20, "in_flight": 20}
    for _ in range(2):
        assert await generator.put([result(keys, task, 30, 30, 20)]) == [True]
    assert await counts(redis, keys) == {"generated": 30, "in_flight": 30}
    await acknowledge(redis, keys, "trained", 26, masked=4)
    assert await counts(redis, keys) == {"generated": 30, "trained": 26, "masked_stale": 4}


async def test_tokens_that_are_lost_on_the_way_are_a_difference(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    await generator.put([result(keys, task, 30, 30, 0)])
    await acknowledge(redis, keys, "trained", 29)
    _, tokens = await read_counts(redis, keys)
    assert LedgerRecord(step=0, unix_s=0.0, account="first", tokens=tokens).difference == 1


async def test_a_rollout_that_begins_anew_supersedes_its_tokens(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    await generator.save([state(task, 20, 20, 0)])
    # A weight update dropped these and five that no save had; six have followed.
    await generator.save([state(task, 6, 31, 20)])
    assert await counts(redis, keys) == {"generated": 31, "in_flight": 6, "superseded": 25}


async def test_another_generator_continues_and_the_first_comes_too_late(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    await generator.save([state(task, 20, 20, 0)])
    await asyncio.sleep(2 * LEASE_S)
    other = inbox(redis, keys, keys.prompts, "other")
    (again,) = await other.reclaim(1)
    await other.put([result(keys, again, 32, 12, 0)])
    # The first one has sampled 35, and neither a state nor a result of it is taken.
    assert await generator.save([state(task, 30, 30, 20)]) == 0
    assert await generator.put([result(keys, task, 35, 35, 30)]) == [False]
    assert await counts(redis, keys) == {"generated": 47, "in_flight": 32, "superseded": 15}
    await acknowledge(redis, keys, "filtered", 32)
    assert await counts(redis, keys) == {"generated": 47, "filtered": 32, "superseded": 15}


async def test_two_attempts_at_a_time_count_both(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    await append(redis, keys.prompts, [task.payload])
    (second,) = await generator.take(1, block_s=1)
    await generator.save([state(task, 20, 20, 0)])
    await generator.save([state(second, 8, 8, 0)])
    assert await counts(redis, keys) == {"generated": 28, "in_flight": 8, "superseded": 20}
    await generator.save([state(task, 25, 25, 20)])
    assert await counts(redis, keys) == {"generated": 33, "in_flight": 25, "superseded": 8}
    await generator.put([result(keys, second, 30, 30, 8)])
    assert await generator.put([result(keys, task, 30, 30, 25)]) == [True]  # written already: the first result wins
    assert await counts(redis, keys) == {"generated": 60, "in_flight": 30, "superseded": 30}


@pytest.mark.parametrize("duplicate_first", [True, False])
async def test_a_rollout_that_was_made_twice_counts_twice(redis: Redis, keys: Keys, duplicate_first: bool) -> None:
    generator, task = await leased(redis, keys)
    await generator.put([result(keys, task, 30, 30, 0)])
    await redis.delete(keys.partial)  # the group is issued again, and its finished rollouts are made again
    await append(redis, keys.prompts, [task.payload])
    (again,) = await generator.take(1, block_s=1)
    await generator.save([state(again, 8, 8, 0)])
    assert await counts(redis, keys) == {"generated": 38, "in_flight": 38}
    await generator.put([result(keys, again, 12, 12, 8)])
    assert await counts(redis, keys) == {"generated": 42, "in_flight": 42}
    learner = inbox(redis, keys, keys.scored, LEARNER)
    first, second = await learner.take(2, block_s=1)
    entries = [
        (first, EndedTokens("0-0", "trained", 26, "masked_stale", 4)),
        (second, EndedTokens("0-0", "superseded", 12, if_recorded=True)),
    ]
    for entry in reversed(entries) if duplicate_first else entries:
        await learner.acknowledge([entry])
    assert await counts(redis, keys) == {"generated": 42, "trained": 26, "masked_stale": 4, "superseded": 12}
    assert not await redis.exists(keys.rollout_tokens)


async def test_a_second_result_that_stays_on_its_way_is_superseded(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    await append(redis, keys.prompts, [task.payload] * 2)
    second, third = await generator.take(2, block_s=1)
    await generator.put([result(keys, task, 30, 30, 0)])
    await redis.delete(keys.partial)
    await generator.put([result(keys, second, 12, 12, 0)])
    await redis.delete(keys.partial)
    await generator.save([state(third, 5, 5, 0)])
    learner = inbox(redis, keys, keys.scored, LEARNER)
    (first, _) = await learner.take(2, block_s=1)
    await learner.acknowledge([(first, EndedTokens("0-0", "trained", 30))])
    assert await counts(redis, keys) == {"generated": 47, "trained": 30, "in_flight": 17}
    await abandon(redis, keys, [("0-0", 5)])
    assert await counts(redis, keys) == {"generated": 47, "trained": 30, "unfinished": 5, "in_flight": 12}
    await close(redis, keys, {0: "superseded"}.__getitem__)
    assert await counts(redis, keys) == {"generated": 47, "trained": 30, "unfinished": 5, "superseded": 12}


async def test_what_was_unfinished_when_its_group_ended(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    await generator.save([state(task, 15, 15, 0)])
    await generator.save([EntryState(task, "0-0", b"more", RolloutTokens(20, 20, 15), place=1)])
    for _ in range(2):
        await abandon(redis, keys, [("0-0", 20), ("0-1", None)])
    assert await counts(redis, keys) == {"generated": 20, "unfinished": 20}
    assert not await redis.exists(keys.partial, f"{keys.pieces}0-0", keys.rollout_tokens)


async def test_a_finished_rollout_is_left_to_the_learner(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    await generator.put([result(keys, task, 30, 30, 0)])
    await abandon(redis, keys, [("0-0", None)])
    assert await counts(redis, keys) == {"generated": 30, "in_flight": 30}
    await acknowledge(redis, keys, "failed", 30)
    assert await counts(redis, keys) == {"generated": 30, "failed": 30}


async def test_a_finished_rollout_that_comes_after_the_end_counts_once(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    await generator.put([result(keys, task, 30, 30, 0)])
    await abandon(redis, keys, [("0-0", None)])
    for _ in range(2):  # the reply of the first call may have been lost
        await close(redis, keys, {0: "unused"}.__getitem__)
    assert await counts(redis, keys) == {"generated": 30, "unused": 30}
    # The run is resumed for more steps, and the learner receives it.
    learner = inbox(redis, keys, keys.scored, LEARNER)
    (entry,) = await learner.take(1, block_s=1)
    await learner.acknowledge([(entry, EndedTokens("0-0", "unused", 30, if_recorded=True))])
    assert await counts(redis, keys) == {"generated": 30, "unused": 30}


async def test_the_end_leaves_unfinished_and_trained_rollouts_in_flight(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    await generator.save([state(task, 20, 20, 0)])
    await close(redis, keys, {0: "unused"}.__getitem__)
    assert await counts(redis, keys) == {"generated": 20, "in_flight": 20}
    await generator.put([result(keys, task, 30, 30, 20)])
    await close(redis, keys, {0: ""}.__getitem__)
    assert await counts(redis, keys) == {"generated": 30, "in_flight": 30}


async def test_a_second_entry_counts_where_a_generator_reported_it(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    await generator.put([result(keys, task, 30, 30, 0)])
    learner = inbox(redis, keys, keys.scored, LEARNER)
    (entry,) = await learner.take(1, block_s=1)
    dead = EndedTokens("0-0", "dead_letters", 30, if_recorded=True)
    await learner.dead_letter(entry, "a test", tokens=dead)
    assert await counts(redis, keys) == {"generated": 30, "dead_letters": 30}
    await append(redis, keys.scored, [entry.payload])  # as `gspo deadletter retry`
    (entry,) = await learner.take(1, block_s=1)
    await learner.acknowledge([(entry, EndedTokens("0-0", "superseded", 30, if_recorded=True))])
    assert await counts(redis, keys) == {"generated": 30, "dead_letters": 30}


async def test_tokens_of_evaluations_are_apart(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys, evaluation=True)
    await generator.save([EntryState(task, "v0:0-0", b"state", RolloutTokens(20, 20, 0))])
    await generator.put([EntryOutput(task, keys.eval_rollouts, b"answer", "v0:0-0", RolloutTokens(30, 30, 20))])
    assert await counts(redis, keys) == {"evaluation": 30}


async def test_a_wipe_begins_another_account(redis: Redis, keys: Keys) -> None:
    generator, task = await leased(redis, keys)
    await generator.put([result(keys, task, 30, 30, 0)])
    learner = inbox(redis, keys, keys.scored, LEARNER)
    (entry,) = await learner.take(1, block_s=1)
    await redis.flushall()
    assert await read_counts(redis, keys) == ("", {})
    await redis.set(keys.redis_epoch, "second")
    # The learner has it in memory, and trains it: the present account knows nothing of it.
    await learner.acknowledge([(entry, EndedTokens("0-0", "trained", 30))])
    assert await counts(redis, keys) == {}
