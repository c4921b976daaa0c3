"""The coordinator's metrics of Redis: registered services, entries of the streams, entries that are not leased.

tests/prometheus has the rules that alert by them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from gspo.common.streams.inbox import append
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import Keys
from gspo.common.telemetry import metrics
from gspo.coordinator.redis_state import update_gauges
from tests.integration.coordinator.conftest import CoordinatorProcess, Until, http_address
from tests.integration.coordinator.peers import GeneratorPeer

pytestmark = pytest.mark.asyncio(loop_scope="function")
NUM_ENTRIES, NUM_TAKEN = 5, 2


def shown(metric: str, stream: str) -> float | None:
    return metrics.BY_SERVICE["coordinator"].get_sample_value(metric, {"stream": stream})


async def served(url: str) -> dict[tuple[str, str], float]:
    """(metric, service) -> value, of the metrics at an address."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{url}/metrics")).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, sample.labels.get("service", "")): sample.value for sample in samples}


async def test_a_service_that_never_came_is_counted_as_none(
    redis: Redis,
    keys: Keys,
    configure: Callable[..., Path],
    coordinator: CoordinatorProcess,
    generator: GeneratorPeer,
    until: Until,
) -> None:
    """The alert GspoServiceGone compares the number, so a service that never registered must be 0."""
    coordinator.start(configure())

    async def waits_for_the_learner() -> bool:
        if not await list_instances(redis, keys, "coordinator"):
            return False
        return ("gspo_instances", "learner") in await served(await http_address(redis, keys))

    await until(waits_for_the_learner, "the coordinator to count the instances")
    instances = await served(await http_address(redis, keys))
    assert (instances["gspo_instances", "learner"], instances["gspo_instances", "reward"]) == (0, 0)
    assert instances["gspo_instances", "generation"] == 1


async def test_leased_entries_are_not_counted_as_untaken(redis: Redis, keys: Keys) -> None:
    for _ in range(NUM_ENTRIES):
        await append(redis, keys.prompts, [b"x"])
    await redis.xreadgroup("generation", "g", {keys.prompts: ">"}, count=NUM_TAKEN)
    await update_gauges(redis, keys)
    assert shown("gspo_stream_entries", "prompts") == NUM_ENTRIES
    assert shown("gspo_stream_untaken", "prompts") == NUM_ENTRIES - NUM_TAKEN
    assert shown("gspo_stream_untaken", "scored") == 0


async def test_the_gauges_survive_a_wipe_of_redis(redis: Redis, keys: Keys) -> None:
    await append(redis, keys.rollouts, [b"x"])
    await update_gauges(redis, keys)
    assert shown("gspo_stream_untaken", "rollouts") == 1
    await redis.flushall()
    await update_gauges(redis, keys)
    assert shown("gspo_stream_untaken", "rollouts") == 0
