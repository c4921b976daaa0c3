"""The coordinator as a process under data.curriculum: killed at any point, it draws what seed and log say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gspo.common.config.loading import read_config
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import Keys
from gspo.coordinator.groups.curriculum import Curriculum
from gspo_proto.rollout_pb2 import GroupTask
from tests.integration.coordinator.conftest import NUM_SLOTS, CoordinatorProcess, Until, http_address
from tests.integration.coordinator.peers import GeneratorPeer, LearnerPeer

pytestmark = pytest.mark.asyncio(loop_scope="function")
Configure = Callable[..., Path]
NUM_PROMPTS, NUM_GROUPS = 10, 40
DATA = {"curriculum": "spread", "revisit_passes": 3}


def has_spread(task: GroupTask) -> bool:
    """Three of the ten prompts teach something."""
    return bool(json.loads(task.prompt.columns_json)["answer"] <= 3)


@pytest.mark.long
async def test_a_killed_coordinator_draws_what_seed_and_log_say(
    redis: Redis,
    keys: Keys,
    configure: Configure,
    coordinator: CoordinatorProcess,
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    run_dir = configure(data=DATA)
    coordinator.start(run_dir)
    seen: dict[int, GroupTask] = {}
    learner.differs = lambda group: has_spread(seen[group])

    async def next_are_there() -> bool:
        for task in await generator.take():
            assert seen.setdefault(task.group, task).prompt == task.prompt
        return len(seen) >= min(NUM_GROUPS, learner.progress.version * 2 + NUM_SLOTS)

    while len(seen) < NUM_GROUPS:
        await until(next_are_there, "the next groups")
        version = learner.progress.version
        if version % 4 == 1:
            coordinator.kill()
        # The younger group first: the order of the log is not that of the issue.
        trained = await learner.trained([2 * version + 1, 2 * version])
        await learner.live(trained)
        if version % 4 == 1:
            if version == 5:  # Redis lost which groups are open: all of them are drawn and issued again
                await redis.flushall()
            coordinator.start(run_dir)
    assert sorted(seen) == list(range(len(seen)))

    order = Curriculum(read_config(run_dir / "config.yaml"), [NUM_PROMPTS])
    assert learner.results is not None
    order.learn(learner.results)
    answers = [json.loads(seen[group].prompt.columns_json)["answer"] for group in sorted(seen)]
    assert answers == [order.place(group).place + 1 for group in sorted(seen)]
    late = Counter(answer <= 3 for answer in answers[16:])
    assert late[True] > late[False], "three of ten prompts have most of the groups"
    state: dict[str, Any] = httpx.get(f"{await http_address(redis, keys)}/v1/state").json()
    (row,) = state["curriculum"]
    assert (row["source"], row["prompts"]) == ("", NUM_PROMPTS)
    assert row["equal"] == 7


async def test_a_draw_waits_for_a_learner_that_does_not_send_results(
    redis: Redis,
    keys: Keys,
    configure: Configure,
    coordinator: CoordinatorProcess,
    learner: LearnerPeer,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    learner.results = None
    coordinator.start(configure(data=DATA))
    seen: list[GroupTask] = []
    trained, expected = 0, "to send the results of settled groups, which the curriculum follows"

    async def waits() -> bool:
        nonlocal trained
        seen.extend(await generator.take())
        if len(seen) >= 2 * trained + NUM_SLOTS:
            await learner.live(await learner.trained([2 * trained, 2 * trained + 1]))
            trained += 1
        coordinators = await list_instances(redis, keys, "coordinator")
        return any(instance.activity["detail"].startswith(expected) for instance in coordinators)

    await until(waits, "the coordinator to wait for results")
    # Six groups need no result: four slots, and two read ahead.
    assert [task.group for task in seen] == list(range(6))
    learner.results = [(group, True) for group in range(2 * trained)]

    async def goes_on() -> bool:
        seen.extend(await generator.take())
        return len(seen) == 2 * trained + NUM_SLOTS

    await until(goes_on, "the free slots to be filled")
    assert [task.group for task in seen] == list(range(2 * trained + NUM_SLOTS))
