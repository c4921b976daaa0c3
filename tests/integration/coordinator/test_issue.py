"""The coordinator as a process against a real Redis and the learner's contract: issue, slots, deadlines, recovery."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from gspo.common.config.loading import read_config
from gspo.common.streams.inbox import FIELD, EntryOutput, EntryState, Inbox, create_consumer_groups
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import PAUSED_BY_USER, Keys, rollout_key
from gspo.coordinator.data.prompts import training_prompts
from gspo.coordinator.data.tokenizer import load_tokenizer
from gspo.coordinator.groups.ledger import MOST_AT_ONCE, GroupLedger
from gspo.coordinator.redis_state import all_entries
from gspo_proto.rollout_pb2 import SETTLEMENT_UNUSED, GroupTask, RolloutState, Scored, SettledGroup, StepDone
from tests.integration.coordinator.conftest import NUM_SLOTS, CoordinatorProcess, Until, has_open, http_address
from tests.integration.coordinator.peers import GeneratorPeer, LearnerPeer
from tests.support.push_peers import service_of

pytestmark = pytest.mark.asyncio(loop_scope="function")
Configure = Callable[..., Path]


async def tasks(redis: Redis, keys: Keys) -> list[GroupTask]:
    """Everything in the prompts stream."""
    entries: Any = await redis.xrange(keys.prompts)
    return [GroupTask.FromString(fields[FIELD]) for _, fields in entries]


async def groups(redis: Redis, keys: Keys) -> list[int]:
    return [task.group for task in await tasks(redis, keys)]


async def open_groups(redis: Redis, keys: Keys) -> dict[int, dict[str, Any]]:
    entries: Any = await redis.hgetall(keys.open)
    return {int(group): json.loads(text) for group, text in sorted(entries.items())}


async def test_as_many_groups_as_slots_and_no_more(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, learner: LearnerPeer, until: Until
) -> None:
    coordinator.start(configure(data={"shuffle": False}))

    await until(has_open(redis, keys), "the first groups")
    issued = await tasks(redis, keys)
    assert [task.group for task in issued] == [0, 1, 2, 3]
    first = issued[0]
    assert (first.schema, first.attempt, first.num_rollouts, first.min_version, first.evaluation) == (1, 1, 2, 0, "")
    assert (first.prompt.text, first.prompt.columns_json) == ("0+1=", '{"answer": 1}')
    assert (first.sampling.temperature, first.sampling.max_tokens) == (1.0, 8)
    assert [(use.name, use.weight) for use in first.rewards] == [("reward", 1.0)]
    assert first.deadline_unix_s == pytest.approx(first.issued_unix_s + 600, abs=1.0)
    opened = await open_groups(redis, keys)
    assert list(opened) == [0, 1, 2, 3]
    assert opened[0] == {
        "attempt": 1,
        "issued_unix_s": first.issued_unix_s,
        "deadline_unix_s": first.deadline_unix_s,
        "min_version": 0,
        "progress": 0,
    }


@pytest_asyncio.fixture(loop_scope="function")
async def ledger(redis_url: str, keys: Keys, configure: Configure) -> AsyncIterator[GroupLedger]:
    """A ledger of more slots than one tick can fill."""
    config = read_config(configure(algorithm={"rollout_batch_size": 10**12}) / "config.yaml")
    service = service_of("coordinator-0", config, redis_url)
    yield GroupLedger(service, training_prompts(config, load_tokenizer(config.model)))
    await service.close()


async def test_any_number_of_slots_is_filled_in_parts(redis: Redis, keys: Keys, ledger: GroupLedger) -> None:
    """A tick reads, prepares and writes at most MOST_AT_ONCE groups for any number of free slots."""
    await ledger.prepare(ledger.slots.num_free)
    assert await ledger.issue(ledger.slots.num_free) == await ledger.issue(ledger.slots.num_free) == MOST_AT_ONCE
    assert await groups(redis, keys) == list(range(2 * MOST_AT_ONCE))
    await redis.delete(keys.prompts, keys.open)
    await create_consumer_groups(redis, keys)
    await ledger.reissue_open("redis_wiped")
    assert await groups(redis, keys) == list(range(2 * MOST_AT_ONCE))


async def test_any_number_of_expired_groups_is_issued_again_in_parts(
    redis: Redis, keys: Keys, ledger: GroupLedger
) -> None:
    """One look at the deadlines writes at most MOST_AT_ONCE groups; the next one takes the others."""
    await ledger.issue(MOST_AT_ONCE)
    await ledger.issue(10)
    await redis.delete(keys.prompts)
    for group, open_group in list(ledger.slots.open.items()):
        ledger.slots.open[group] = replace(open_group, deadline_unix_s=0.0)
    await ledger.handle_expired()
    assert await groups(redis, keys) == list(range(MOST_AT_ONCE))
    await ledger.handle_expired()
    assert await groups(redis, keys) == list(range(MOST_AT_ONCE + 10))
    assert {group["attempt"] for group in (await open_groups(redis, keys)).values()} == {2}


async def test_a_clock_that_is_set_moves_no_deadline(
    redis: Redis, keys: Keys, ledger: GroupLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    await ledger.issue(2)
    for jump_s in (86400.0, -86400.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: now_s + jump_s)
        await ledger.handle_expired()
        assert [group["attempt"] for group in (await open_groups(redis, keys)).values()] == [1, 1]
    late = replace(ledger.slots.open[0], deadline_unix_s=now_s + 86400.0)
    await redis.hset(keys.open, "0", late.to_json())
    await ledger.read_open()
    assert now_s < ledger.slots.open[0].deadline_unix_s < now_s + 3600.0, "no later than that of a new group"


async def test_a_batch_beyond_one_part_is_issued_whole(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, learner: LearnerPeer, until: Until
) -> None:
    num_groups = 2 * (MOST_AT_ONCE + 10)
    coordinator.start(configure(algorithm={"rollout_batch_size": num_groups // 2}))

    async def all_issued() -> bool:
        return int(await redis.xlen(keys.prompts)) >= num_groups

    await until(all_issued, "every slot's group")
    assert sorted(await groups(redis, keys)) == list(range(num_groups))


async def test_slots_follow_steps_and_versions(
    redis: Redis,
    keys: Keys,
    configure: Configure,
    coordinator: CoordinatorProcess,
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    coordinator.start(configure())
    seen: list[GroupTask] = []

    async def seen_at_least(count: int) -> None:
        async def enough() -> bool:
            seen.extend(await generator.take())
            return len(seen) >= count

        await until(enough, f"{count} groups")

    await seen_at_least(4)
    await redis.hset(keys.partial, rollout_key(1, 1), "done")
    await learner.trained([0, 1])

    async def two_open() -> bool:
        return list(await open_groups(redis, keys)) == [2, 3]

    await until(two_open, "the trained groups to leave the open hash")
    assert not await redis.hexists(keys.partial, rollout_key(1, 1))
    assert await generator.take(block_s=0.5) == []  # version 1 is not live yet
    await learner.live(1)
    await seen_at_least(6)
    assert [(task.group, task.min_version) for task in seen[4:]] == [(4, 1), (5, 1)]
    await learner.filtered(4)
    await seen_at_least(7)
    assert [task.group for task in seen] == [0, 1, 2, 3, 4, 5, 6]
    assert list(await open_groups(redis, keys)) == [2, 3, 5, 6]
    assert await redis.xlen(keys.prompts) == 0


async def test_an_expired_group_is_issued_again_and_then_given_up(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, learner: LearnerPeer, until: Until
) -> None:
    coordinator.start(configure(staleness={"max_lag": 0, "group_deadline_s": 0.5, "max_attempts": 2}))

    async def given_up() -> bool:
        return await redis.xlen(keys.scored) >= 2

    await until(given_up, "both groups to be given up")
    assert sorted((task.group, task.attempt) for task in await tasks(redis, keys)) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    entries: Any = await redis.xrange(keys.scored)
    failures = [Scored.FromString(fields[FIELD]).failure for _, fields in entries][:2]
    assert [(failure.group, failure.attempt) for failure in failures] == [(0, 2), (1, 2)]
    assert failures[0].reason == "not finished within 0.5 s in any of 2 attempts"
    await learner.filtered(0, 1)

    async def only_new() -> bool:
        return set(await groups(redis, keys)) == {2, 3}

    await until(only_new, "new groups, and the tasks of settled ones gone")


async def test_a_group_that_still_grows_is_not_issued_again_at_its_deadline(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, learner: LearnerPeer, until: Until
) -> None:
    """Group 0's rollouts grow between two checks, group 1's do not."""
    coordinator.start(configure(staleness={"max_lag": 0, "group_deadline_s": 1.0, "max_attempts": 2}))
    lengths = iter(range(1, 1000))

    async def given_up() -> bool:
        n = next(lengths)
        state = RolloutState(
            schema=1, started_unix_s=1.0, token_ids=range(n), logp=[-1.0] * n, version=[0] * n, mask=b"\x01" * n
        )
        await redis.hset(keys.partial, rollout_key(0, 0), state.SerializeToString())
        return await redis.xlen(keys.scored) > 0

    await until(given_up, "group 1 to be given up")
    entries: Any = await redis.xrange(keys.scored)
    assert {Scored.FromString(fields[FIELD]).failure.group for _, fields in entries} == {1}
    assert [task.attempt for task in await tasks(redis, keys) if task.group == 0] == [1]
    entry = (await open_groups(redis, keys))[0]
    assert entry["progress"] > 0
    assert entry["deadline_unix_s"] > entry["issued_unix_s"] + 1.5


async def test_a_killed_coordinator_misses_no_group_and_repeats_none(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, learner: LearnerPeer, until: Until
) -> None:
    run_dir = configure()
    coordinator.start(run_dir)

    await until(has_open(redis, keys), "the first groups")
    coordinator.kill()
    # While it is away: a step whose version goes live, a group filtered, and one lost with a part of Redis.
    await learner.trained([0, 2])
    await learner.live(1)
    await learner.filtered(3)
    await redis.hdel(keys.open, "1")
    await redis.set(keys.paused, PAUSED_BY_USER)
    coordinator.start(run_dir)

    async def paused() -> bool:
        return any(
            instance.activity["what"] == "resume" for instance in await list_instances(redis, keys, "coordinator")
        )

    await until(paused, "the coordinator to continue in the middle of a pause")
    assert await open_groups(redis, keys) == {}
    await redis.delete(keys.paused)

    async def refilled() -> bool:
        return list(await open_groups(redis, keys)) == [1, 4, 5, 6]

    await until(refilled, "the lost group and three new ones")
    # Tasks of settled groups are gone; the lost one is there twice, once for each issue.
    assert sorted(await groups(redis, keys)) == [1, 1, 4, 5, 6]
    # The step that ended while there was no coordinator is the last one.
    async with httpx.AsyncClient(base_url=await http_address(redis, keys)) as api:
        last = (await api.get("/v1/status")).json()["last_step"]
    assert (last["seconds"], [cause["cause"] for cause in last["by_cause"]]) == (1.0, ["training"])


async def test_a_wiped_redis_gets_its_open_groups_again(
    redis: Redis,
    keys: Keys,
    configure: Configure,
    coordinator: CoordinatorProcess,
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    coordinator.start(configure())

    await until(has_open(redis, keys), "the first groups")
    taken = {task.group: task for task in await generator.take()}
    assert len(taken) == NUM_SLOTS
    await learner.trained([0, 1], silent=True)  # its event is lost
    async with redis.pipeline(transaction=True) as pipe:
        pipe.flushall()
        # As when a group is issued before the wipe is noticed.
        pipe.xadd(keys.prompts, {FIELD: taken[3].SerializeToString()})
        await pipe.execute()
    learner.progress.live_version = 1

    async def recovered() -> bool:
        return set(await open_groups(redis, keys)) == {2, 3, 4, 5}

    await until(recovered, "open groups without those that the learner has settled")
    again = sorted((task.group, task.attempt) for task in await generator.take() if task.group > 1)
    assert again == [(2, 1), (3, 1), (4, 1), (5, 1)]
    await learner.filtered(2)

    async def continued() -> bool:
        return set(await open_groups(redis, keys)) == {3, 4, 5, 6}

    await until(continued, "events to count after the wipe")


async def test_a_second_task_after_a_wipe_is_removed_with_its_group(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, learner: LearnerPeer, until: Until
) -> None:
    """The learner trains rollouts of before the wipe, while a generator works on the group again."""
    coordinator.start(configure())

    async def issued() -> bool:
        return len(await open_groups(redis, keys)) == NUM_SLOTS and bool(await redis.exists(keys.prompts))

    await until(issued, "the first groups")
    await redis.flushall()
    await until(issued, "the same groups again")
    inbox = Inbox(redis, keys, keys.prompts, consumer="again", lease_s=30.0)
    leased = {delivery.message.group: delivery for delivery in await inbox.take(64, block_s=1.0)}
    assert {0, 1} <= set(leased)
    assert await inbox.save([EntryState(leased[0], rollout_key(0, 0), b"of the second copy")]) == 1

    await learner.trained([0, 1])

    async def removed() -> bool:
        return not set(await open_groups(redis, keys)) & {0, 1}

    await until(removed, "the trained groups to be closed")
    assert await inbox.save([EntryState(leased[1], rollout_key(1, 0), b"too late")]) == 0
    assert await inbox.put([EntryOutput(leased[0], keys.rollouts, b"too late", rollout_key(0, 1))]) == [False]
    assert await redis.hgetall(keys.partial) == {}


async def test_a_write_that_is_made_again_after_its_group_was_trained_is_refused(
    redis: Redis, keys: Keys, ledger: GroupLedger
) -> None:
    await ledger.remove_settled()  # a look for tasks of an earlier process
    await ledger.issue(1)
    inbox = Inbox(redis, keys, keys.prompts, consumer="generator", lease_s=30.0)
    (delivery,) = await inbox.take(1, block_s=1.0)
    outputs = [EntryOutput(delivery, keys.rollouts, b"rollout", rollout_key(0, number)) for number in (0, 1)]
    assert await inbox.put(outputs) == [True, True]
    ledger.on_step(StepDone(step=1, version=1, groups=[0]))
    await ledger.remove_settled()
    # Its reply was lost, so the generator makes it again before it gives the task back.
    assert await inbox.put(outputs) == [False, False]
    assert await redis.xlen(keys.rollouts) == 2
    assert await redis.hgetall(keys.partial) == {}


async def test_a_task_that_is_put_back_while_its_group_is_removed_is_removed_too(
    redis: Redis, keys: Keys, ledger: GroupLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.issue(1)
    inbox = Inbox(redis, keys, keys.prompts, consumer="generator", lease_s=30.0)
    (delivery,) = await inbox.take(1, block_s=1.0)
    await inbox.save([EntryState(delivery, rollout_key(0, 0), b"state")])

    async def put_back_after_a_look(redis: Redis, stream: str) -> Any:
        seen = await all_entries(redis, stream)
        await inbox.requeue(delivery, group=0)
        for again in await inbox.take(1, block_s=0.01):
            await inbox.save([EntryState(again, rollout_key(0, 1), b"state of the task that was put back")])
        return seen

    monkeypatch.setattr("gspo.coordinator.groups.ledger.all_entries", put_back_after_a_look)
    ledger.on_settled([SettledGroup(group=0, settlement=SETTLEMENT_UNUSED)])
    await ledger.remove_settled()
    assert await tasks(redis, keys) == []
    assert await redis.hgetall(keys.partial) == {}


async def test_a_step_whose_event_was_never_sent_is_found_in_the_learners_account(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, learner: LearnerPeer, until: Until
) -> None:
    coordinator.start(configure())

    await until(has_open(redis, keys), "the first groups")
    await learner.trained([0, 1], silent=True)
    learner.progress.epoch = 2
    await learner.live(1)

    async def continued() -> bool:
        return list(await open_groups(redis, keys)) == [2, 3, 4, 5]

    await until(continued, "the lost step to be settled")


async def test_events_of_a_learner_that_lost_the_run_are_dropped(
    redis: Redis, keys: Keys, configure: Configure, coordinator: CoordinatorProcess, learner: LearnerPeer, until: Until
) -> None:
    learner.progress.epoch = 5
    coordinator.start(configure())

    await until(has_open(redis, keys), "the first groups")
    old = LearnerPeer(redis, keys)
    old.progress.epoch = 4
    await old.filtered(0, 1, 2, 3)
    await learner.filtered(2)

    async def one_replaced() -> bool:
        return list(await open_groups(redis, keys)) == [0, 1, 3, 4]

    await until(one_replaced, "the newer learner's event alone to count")
