"""Real pushes: the learner's publisher here, the generation service with vLLM in processes of its own, Redis between.

The engine has nothing to generate meanwhile, so the times are those of the push alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from benchmarks.harness.single_service import beside
from benchmarks.harness.workload import write_config
from benchmarks.push.versions import model, policy
from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.config.loading import write_config as write_whole_config
from gspo.common.config.schema import Config
from gspo.common.service.app import Service
from gspo.common.service.options import Options
from gspo.common.streams.instances import wait_for_instance
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.publisher import Publisher
from gspo_proto.rollout_pb2 import VersionLive

_START_S, _PUSH_S = 300.0, 60.0


def measure(rates: Sequence[float], versions: int) -> dict[str, Any]:
    """What every push cost: for each learning rate the whole model first, then each version's changes."""
    sections = {"model": {"path": str(model())}}
    config = read_config(write_config("push", "fixed", "bfloat16", **sections))
    config.run_dir.mkdir()
    write_whole_config(config, config.run_dir / CONFIG_NAME)
    return asyncio.run(beside("generation", config, lambda redis, url: _push_all(config, redis, url, rates, versions)))


async def _push_all(config: Config, redis: Redis, url: str, rates: Sequence[float], versions: int) -> dict[str, Any]:
    service = Service(Options("learner", config.run_dir, url, "learner-0", "127.0.0.1", 0, 0, False, config))
    await wait_for_instance(redis, service.keys, "generation", _START_S)
    found = []
    for epoch, rate in enumerate(rates, 1):
        # A learner that starts anew has no version before and pushes everything.
        named = [policy(rate, version, number=10 * epoch + version) for version in range(versions + 1)]
        found += [
            {"rate": rate, "version": version, **push}
            for version, push in enumerate(await _push(service, epoch, named))
        ]
    await service.redis.aclose()
    return {"pushes": found}


async def _push(service: Service, epoch: int, policies: Sequence[PolicyWeights]) -> list[dict[str, float]]:
    """One learner's life: publish each policy when the one before is live."""
    live: asyncio.Queue[VersionLive] = asyncio.Queue()
    publisher = Publisher(service, epoch, live.put)
    running = asyncio.create_task(publisher.run())
    found = []
    try:
        for one in policies:
            publisher.publish(one)
            async with asyncio.timeout(_PUSH_S):
                cost = await live.get()
            found.append(
                {
                    "push_s": cost.push_s,
                    "stage_s": cost.push_s - cost.stall_s,
                    "stall_s": cost.stall_s,
                    "bytes": cost.bytes,
                    "share": cost.bytes / one.num_bytes,
                }
            )
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return found
