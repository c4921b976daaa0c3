"""Real pushes: the learner's publisher here, the generation service with vLLM in processes of its own, Redis between.

The engine has nothing to generate meanwhile, so the times are those of the push alone. Only child processes import it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.services import running_services
from benchmarks.push.versions import load_version
from gspo.common.config.loading import read_config
from gspo.common.config.schema import Config
from gspo.common.service.app import Service
from gspo.common.service.options import Options
from gspo.common.streams.instances import wait_for_instance
from gspo.common.tasks import task_group
from gspo.learner.push.policy_weights import PolicyWeights
from gspo.learner.push.publisher import Publisher
from gspo_proto.rollout_pb2 import VersionLive

_START_S, _PUSH_S = 300.0, 60.0


def push_all(config: str, folder: str, rates: Sequence[float], versions: int) -> list[dict[str, Any]]:
    """The cost of every push: for each learning rate the whole model first, then each version's changes."""
    return asyncio.run(_push_all(read_config(Path(config)), Path(folder), rates, versions))


async def _push_all(config: Config, folder: Path, rates: Sequence[float], versions: int) -> list[dict[str, Any]]:
    pushes = []
    async with running_services(config, "generation") as services:
        options = Options("learner", config.run_dir, services.redis_url, "learner-0", "127.0.0.1", 0, 0, False, config)
        learner = Service(options)
        await wait_for_instance(services.redis, services.keys, "generation", _START_S)
        for epoch, rate in enumerate(rates, 1):
            # A learner that starts anew has no version before and pushes everything.
            policies = [load_version(folder, rate, n, number=10 * epoch + n) for n in range(versions + 1)]
            costs = await _push(learner, epoch, policies)
            pushes += [{"rate": rate, "version": version, **cost} for version, cost in enumerate(costs)]
        await learner.close()
    return pushes


async def _push(learner: Service, epoch: int, policies: Sequence[PolicyWeights]) -> list[dict[str, float]]:
    """Publish each policy when the one before is live, as a learner process of this epoch."""
    live: asyncio.Queue[VersionLive] = asyncio.Queue()
    publisher = Publisher(learner, epoch, live.put)
    costs = []
    async with task_group(publisher.run()):
        for policy in policies:
            publisher.publish(policy)
            async with asyncio.timeout(_PUSH_S):
                served = await live.get()
            cost = {"push_s": served.push_s, "stage_s": served.push_s - served.stall_s, "stall_s": served.stall_s}
            costs.append({**cost, "bytes": served.bytes, "share": served.bytes / policy.num_bytes})
    return costs
