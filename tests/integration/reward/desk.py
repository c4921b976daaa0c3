"""The REST app of the reward service within the test's own process, on a real Redis and the real sandbox.

What it is not: the service; test_service.py starts that. Neighbours: test_rest.py, test_registry.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from services.common.reward_config import RewardConfig
from services.reward.admission import Admission
from services.reward.callers import Callers, RateLimit
from services.reward.door.app import rest_app
from services.reward.door.guard import Guard
from services.reward.door.routes import Desk
from services.reward.registry import Registry
from services.reward.scorer import Scorer, open_scorer
from services.reward.usage import UsageCounter
from tests.reward_case import reward_config

SOURCE = (
    "def reward(completions, answer, **columns):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
)
NEWER = SOURCE.replace("float(c == a)", "2.0 * (c == a)")
BASE = "def reward(completions): return [0.0] * len(completions)\n"


class RestClient(httpx.AsyncClient):
    """Its paths come behind /v1/rewards."""

    async def request(self, method: str, url: Any, **given: Any) -> httpx.Response:
        return await super().request(method, f"/v1/rewards{url}", **given)


@asynccontextmanager
async def open_desk(
    folder: Path, redis: Redis, *, service_token: str = "", **reward: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Scorer, Registry]]:
    """A client of the app, and what scores and keeps behind it; the run's configuration has one function, `r`."""
    config: RewardConfig = reward_config(folder, BASE, **reward)
    registry = Registry(redis, folder / "registry", replica="test", quotas=config.quotas)
    usage = UsageCounter(redis)
    async with open_scorer(config, name="reward-0", registry=registry, usage=usage) as scorer:
        guard = Guard(Callers(service_token, config.tokens), RateLimit(config.calls_per_minute))
        admission = Admission(scorer.library, config.allowed_packages)
        transport = httpx.ASGITransport(app=rest_app(Desk(scorer.library, registry, admission, usage, guard)))
        async with RestClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield client, scorer, registry
