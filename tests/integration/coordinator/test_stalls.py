"""A run in which nothing moves: its chain of waits is sent, its groups are issued again, or it ends and can be resumed.

The coordinator and Redis are real; the other services say in their heartbeats what they wait for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from gspo.common.config.loading import read_config
from gspo.common.streams.entries import body_of
from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.instances import Instance, Registration
from gspo.common.streams.keys import Keys, rollout_key
from gspo.common.streams.saved_states import DONE
from gspo.common.telemetry.activity import Activity
from gspo.coordinator import stall_watch
from gspo.coordinator.data.prompts import training_prompts
from gspo.coordinator.data.tokenizer import load_tokenizer
from gspo.coordinator.evaluation.scheduler import EvaluationScheduler
from gspo.coordinator.groups.ledger import GroupLedger
from gspo.coordinator.loop import Coordinator
from gspo_proto.rollout_pb2 import RUN_END_FAILED, Event, Finished, Stalled
from tests.integration.coordinator.conftest import NUM_SLOTS, Until, has_open
from tests.integration.coordinator.peers import GeneratorPeer, LearnerPeer
from tests.support.push_peers import service_of

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]
LIMIT_S = 2.0


@pytest_asyncio.fixture(loop_scope="function")
async def coordinating(
    redis: Redis,
    redis_url: str,
    keys: Keys,
    configure: Callable[..., Path],
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[asyncio.Task[None]]:
    """A coordinator among services that all wait: every slot holds a group whose tasks and rollouts are lost."""
    monkeypatch.setattr(stall_watch, "_LEAST_LIMIT_S", LIMIT_S)
    config = read_config(configure(services={"lease_s": 0.5}) / "config.yaml")
    service = service_of("coordinator-0", config, redis_url)
    ledger = GroupLedger(service, training_prompts(config, load_tokenizer(config.model)))
    reward_activity = Activity("reward")
    for activity, what in (
        (learner.activity, "rollouts"),
        (reward_activity, "rollouts"),
        (generator.activity, "prompts"),
    ):
        activity.set("waiting", what)
    registration = Registration(redis, keys, Instance("reward", "reward-0"), reward_activity, dict)
    beating = asyncio.create_task(registration.run())
    running = asyncio.create_task(Coordinator(service, ledger, EvaluationScheduler(service, {})).run())
    await until(has_open(redis, keys), "the first groups")
    entries: Any = await redis.xrange(keys.prompts)
    await redis.xdel(keys.prompts, *(entry for entry, _ in entries))
    await redis.hset(keys.partial, rollout_key(0, 0), DONE)
    yield running
    service.stopping.set()
    await running
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    await service.close()


async def bodies(redis: Redis, keys: Keys, kind: type) -> list[Any]:
    events: list[tuple[bytes, Event]] = await Events(redis, keys, "test").read(FROM_START, block_s=0.01)
    return [body for _, event in events if isinstance(body := body_of(event), kind)]


async def test_slots_that_are_never_freed_are_issued_again_and_the_run_goes_on(
    redis: Redis,
    keys: Keys,
    coordinating: asyncio.Task[None],
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    began_s = time.monotonic()
    taken: set[Any] = set()

    async def issued_again() -> bool:
        taken.update(task.group for task in await generator.take())
        return len(taken) == NUM_SLOTS

    await until(issued_again, "every group again", timeout_s=2 * LIMIT_S + 2.0)
    assert time.monotonic() - began_s > LIMIT_S
    # A finished rollout is made again, for its entry is nowhere.
    assert await redis.hgetall(keys.partial) == {}
    (stalled,) = await bodies(redis, keys, Stalled)
    assert stalled.reason == (
        "nothing has moved for 2 s: learner-0 waits for rollouts <- reward-0 waits for rollouts"
        " <- generation-0 waits for prompts <- coordinator waits for slots to be free: of 4, 4 hold open groups and 0"
        " hold trained groups whose version no generator has yet"
    )
    await learner.live(await learner.trained([0, 1]))

    async def goes_on() -> bool:
        taken.update(task.group for task in await generator.take())
        return {4, 5} <= taken

    await until(goes_on, "the next groups")
    assert not coordinating.done()


async def test_a_stall_that_nothing_helps_ends_the_run_with_its_chain(
    redis: Redis, keys: Keys, coordinating: asyncio.Task[None]
) -> None:
    await asyncio.wait_for(coordinating, 2 * LIMIT_S + 5.0)
    (finished,) = await bodies(redis, keys, Finished)
    assert finished.end == RUN_END_FAILED
    assert "generation-0 waits for prompts <- coordinator waits for slots" in finished.reason
    assert finished.reason.endswith("a resume continues")
    assert await redis.hlen(keys.open) == NUM_SLOTS
