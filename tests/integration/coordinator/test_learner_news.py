"""The coordinator's two sources about the learner, against a real Redis and a gRPC peer: events, and its progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from gspo.common.config.loading import read_config
from gspo.common.service.app import Service
from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.keys import Keys
from gspo.coordinator.data.prompts import training_prompts
from gspo.coordinator.data.tokenizer import load_tokenizer
from gspo.coordinator.evaluation.scheduler import EvaluationScheduler
from gspo.coordinator.feed import EventFeed, LearnerProgress
from gspo.coordinator.groups.ledger import GroupLedger
from gspo.coordinator.loop import Coordinator
from gspo_proto.learner_pb2 import GroupRange, ProgressReply
from gspo_proto.rollout_pb2 import RUN_END_COMPLETED, Event, PromptsExhausted, StopRequested, VersionLive
from tests.integration.coordinator.conftest import NUM_SLOTS, Until, has_open
from tests.integration.coordinator.peers import LearnerPeer
from tests.support.push_peers import service_of

pytestmark = pytest.mark.asyncio(loop_scope="function")
# Well below the 10 s between two regular calls.
ANSWER_LIMIT_S = 5.0


@pytest_asyncio.fixture(loop_scope="function")
async def service(configure: Callable[..., Path], redis_url: str) -> AsyncIterator[Service]:
    service = service_of("coordinator-0", read_config(configure() / "config.yaml"), redis_url)
    yield service
    await service.close()


async def answer(progress: LearnerProgress) -> ProgressReply:
    async with asyncio.timeout(ANSWER_LIMIT_S):
        while (reply := progress.poll()) is None:
            await asyncio.sleep(0.02)
    return reply


async def test_events_of_an_older_learner_are_dropped_and_a_newer_one_raises_the_epoch(
    redis: Redis, keys: Keys, service: Service
) -> None:
    events, feed = Events(redis, keys, "learner-0"), EventFeed(service)
    await events.send(Event(epoch=2, version_live=VersionLive(version=1)))
    assert await feed.start() == [VersionLive(version=1)]
    for epoch, version in ((2, 2), (1, 9), (3, 3)):
        await events.send(Event(epoch=epoch, version_live=VersionLive(version=version)))
    await events.send(Event(stop_requested=StopRequested(reason="enough")))
    expected = [VersionLive(version=2), VersionLive(version=3), StopRequested(reason="enough")]
    assert await feed.read(0.1) == expected
    await feed.send(Event(prompts_exhausted=PromptsExhausted(num_groups=4)))
    (*_, (_, newest)) = await events.read(FROM_START, 0.1)
    assert (feed.epoch, newest.epoch, newest.prompts_exhausted.num_groups) == (3, 3, 4)


async def test_a_new_learner_is_asked_without_a_wait_and_is_recognised_once(
    service: Service, learner: LearnerPeer
) -> None:
    progress = LearnerProgress(service)
    learner.progress.evaluations.append("v0")
    first = await answer(progress)
    assert progress.note(first)
    assert not progress.note(first)
    assert progress.recorded == {"v0"}
    learner.progress.epoch = first.epoch + 1
    progress.ask_now()
    assert progress.note(await answer(progress))


async def test_redis_has_nothing_of_settled_groups_when_the_end_is_announced(
    redis: Redis, keys: Keys, service: Service, learner: LearnerPeer, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    prompts = training_prompts(service.config, load_tokenizer(service.config.model))
    coordinator = Coordinator(service, GroupLedger(service, prompts), EvaluationScheduler(service, {}))
    send, num_open = coordinator.feed.send, list[int]()

    async def send_and_look(event: Event) -> None:
        if event.HasField("finished"):
            num_open.append(await redis.hlen(keys.open))
        await send(event)

    monkeypatch.setattr(coordinator.feed, "send", send_and_look)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(coordinator.run())
        await until(has_open(redis, keys), "every slot to be taken")
        # The events of the endings are lost: the coordinator gets settlements and end in one answer.
        learner.progress.settled.append(GroupRange(first=0, last=NUM_SLOTS - 1))
        learner.progress.epoch, learner.progress.end, learner.progress.end_reason = 2, RUN_END_COMPLETED, "a test"
        await learner.events.send(Event(epoch=2, version_live=VersionLive(version=0)))
    assert num_open == [0]
