"""Dead letters on a real Redis: unreadable entries are counted, and a retry sends an entry back once or not at all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from typer.testing import CliRunner

from gspo.cli.commands import app
from gspo.cli.dead_letters import drop, letters, retry
from gspo.common.errors import InputError
from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.inbox import Inbox, append, create_consumer_groups
from gspo.common.streams.keys import Keys
from gspo.common.telemetry import metrics
from gspo_proto.rollout_pb2 import Event, Finished, GroupTask, Prompt, Rollout, Scored, ScoredRollout
from tests.support.service_process import make_run
from tests.support.typed.redis_entries import dead_letters

function_loop = pytest.mark.asyncio(loop_scope="function")
TASK = GroupTask(schema=1, group=7, num_rollouts=2, prompt=Prompt(token_ids=[1]))
ROLLOUT = Rollout(schema=1, group=7, number=1, num_rollouts=2)
GOOD: dict[str, Any] = {
    "prompts": TASK,
    "eval_prompts": GroupTask(schema=1, group=2, num_rollouts=1, prompt=Prompt(token_ids=[1]), evaluation="v3"),
    "rollouts": ROLLOUT,
    "eval_rollouts": ROLLOUT,
    "scored": Scored(schema=1, rollout=ScoredRollout(rollout=ROLLOUT)),
    "eval_scored": Scored(schema=1, rollout=ScoredRollout(rollout=ROLLOUT)),
}


def inbox(redis: Redis, keys: Keys, stream: str, consumer: str = "worker", lease_s: float = 30.0) -> Inbox:
    return Inbox(redis, keys, keys.key(stream), consumer=consumer, lease_s=lease_s)


def counted(stream: str) -> float:
    return metrics.SHARED.get_sample_value("gspo_dead_letters_total", {"stream": stream}) or 0.0


@function_loop
@pytest.mark.parametrize("stream", GOOD)
async def test_unreadable_entries_become_counted_dead_letters_and_the_rest_is_delivered(
    redis: Redis, keys: Keys, stream: str
) -> None:
    good = GOOD[stream].SerializeToString()
    newer = type(GOOD[stream])()
    newer.CopyFrom(GOOD[stream])
    newer.schema = 9
    before = counted(stream)
    await append(redis, keys.key(stream), [b"\xff\x00 random", good, good[:-1], newer.SerializeToString()])
    await redis.xadd(keys.key(stream), {b"another field": b"x"})
    (delivery,) = await inbox(redis, keys, stream).take(10, block_s=1)
    assert delivery.message == GOOD[stream]
    unreadable = await dead_letters(redis, keys)
    assert [letter.stream for letter in unreadable] == [stream] * 4
    assert unreadable[0].payload == b"\xff\x00 random"
    assert "schema 9" in unreadable[2].reason
    assert {letter.by for letter in unreadable} == {"worker"}
    assert counted(stream) == before + 4
    assert await redis.xlen(keys.key(stream)) == 1  # the good one, which stays leased


@function_loop
async def test_unreadable_entries_become_dead_letters_when_they_are_reclaimed(redis: Redis, keys: Keys) -> None:
    await append(redis, keys.prompts, [b"\xff"])
    # As one of another version would: it takes the entry and dies.
    await redis.xreadgroup("generation", "dead", {keys.prompts: ">"})
    await asyncio.sleep(0.1)
    assert await inbox(redis, keys, "prompts", lease_s=0.05).reclaim(10) == []
    (letter,) = await dead_letters(redis, keys)
    assert (letter.num_deliveries, letter.HasField("group")) == (2, False)


@function_loop
async def test_events_that_cannot_be_read_are_passed_over(redis: Redis, keys: Keys) -> None:
    events = Events(redis, keys, "test")
    await append(redis, keys.events, [b"\xff\xff"])
    await events.send(Event(finished=Finished(reason="done")))
    async with asyncio.timeout(5):
        assert (await events.wait_for_finished(FROM_START)).reason == "done"


async def given_up(redis: Redis, keys: Keys) -> Any:
    """The letter of a task that was handed out and given up."""
    await append(redis, keys.prompts, [TASK.SerializeToString()])
    worker = inbox(redis, keys, "prompts")
    (delivery,) = await worker.take(1, block_s=1)
    assert await worker.dead_letter(delivery, "the engine refuses it", [(keys.scored, b"failure")])
    (item,) = await letters(redis, keys)
    return item


@function_loop
async def test_a_letter_names_what_was_given_up(redis: Redis, keys: Keys) -> None:
    letter = (await given_up(redis, keys)).letter
    assert (letter.group, letter.stream, letter.num_deliveries) == (7, "prompts", 1)
    assert (letter.reason, letter.by) == ("the engine refuses it", "worker")
    assert await redis.xlen(keys.prompts) == 0
    assert await redis.xlen(keys.scored) == 1


@function_loop
async def test_a_retry_sends_an_entry_once_however_many_ask(redis: Redis, keys: Keys) -> None:
    item = await given_up(redis, keys)
    await redis.hset(keys.open, "7", "{}")
    replies = await asyncio.gather(*(retry(redis, keys, item) for _ in range(20)))
    assert sorted(replies) == ["gone"] * 19 + ["sent"]
    (delivery,) = await inbox(redis, keys, "prompts").take(10, block_s=1)
    assert delivery.message == TASK
    assert await letters(redis, keys) == []


@function_loop
async def test_the_entry_of_a_settled_group_is_not_sent(redis: Redis, keys: Keys) -> None:
    item = await given_up(redis, keys)
    assert await retry(redis, keys, item) == "settled"
    assert await redis.xlen(keys.prompts) == 0
    assert await letters(redis, keys) == [item]
    assert await drop(redis, keys, [item.entry, "1-1"]) == 1


def test_the_commands_list_retry_and_drop(redis_url: str, tmp_path: Path) -> None:
    make_run(tmp_path, tmp_path, services={"redis_url": redis_url})
    run_dir, keys = tmp_path / "test", Keys("test")
    # The files that a start of `gspo run` writes beside the configuration.
    (run_dir / "environment.json").write_text("{}")
    (run_dir / "log").mkdir()

    async def prepare() -> None:
        redis = Redis.from_url(redis_url, protocol=2)
        await redis.flushall()
        await create_consumer_groups(redis, keys)
        await given_up(redis, keys)
        await append(redis, keys.rollouts, [b"\xff"])
        await inbox(redis, keys, "rollouts").take(1, block_s=1)
        await redis.aclose()

    asyncio.run(prepare())
    runner = CliRunner()

    def call(*words: str) -> Any:
        return runner.invoke(app, ["deadletter", *words, "--run", str(run_dir)], env={"COLUMNS": "200"})

    task, unread = json.loads(call("list", "--json").output)
    assert (task["stream"], task["group"], task["reason"]) == ("prompts", 7, "the engine refuses it")
    assert (unread["stream"], unread["group"], unread["bytes"]) == ("rollouts", None, 1)
    assert "the engine refuses it" in call("list").output
    refused = call("retry", task["letter"])
    assert refused.exit_code == 1
    assert "group 7 is settled already" in refused.output
    with BlockingRedis.from_url(redis_url) as redis:
        redis.hset(keys.open, "7", "{}")
        assert call("retry", task["letter"]).output.strip() == f"{task['letter']}: back in prompts"
        assert redis.xlen(keys.prompts) == 1
    assert call("drop", "--all").output.strip() == "1 removed"
    assert call("list").output.strip() == "nothing was given up"
    for words, message in (((), "name letters"), (("5-5",), "there is no letter 5-5"), (("5-5", "--all"), "not both")):
        error = call("drop", *words).exception
        assert isinstance(error, InputError)
        assert message in str(error)
