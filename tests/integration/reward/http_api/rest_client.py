"""The REST app of the reward service within the test's own process, on a real Redis and the real sandbox.

What it is not: the service; test_service.py starts that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from gspo.common.config.reward import RewardConfig
from gspo.reward.http_api.routes import RewardApi, rest_app
from gspo.reward.registry.store import Registry
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.scoring.scorer import Scorer, open_scorer
from gspo.reward.submissions.admission import Admission
from gspo.reward.submissions.callers import Callers
from tests.support.reward_rollouts import reward_config

SOURCE = (
    "def reward(completions, answer, **columns):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
)
NEWER = SOURCE.replace("float(c == a)", "2.0 * (c == a)")
BASE = "def reward(completions): return [0.0] * len(completions)\n"


class RestClient(httpx.AsyncClient):
    """Its paths come behind /v1/rewards."""

    async def request(self, method: str, url: Any, **options: Any) -> httpx.Response:
        return await super().request(method, f"/v1/rewards{url}", **options)


@asynccontextmanager
async def open_rest_client(
    folder: Path, redis: Redis, *, service_token: str = "", **reward: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Scorer, Registry]]:
    """A client of the app, its scorer and its registry; the run's configuration has one function, `r`."""
    config: RewardConfig = reward_config(folder, BASE, **reward)
    registry = Registry(redis, folder / "registry", replica="test", quotas=config.quotas)
    usage = UsageCounter(redis)
    async with (
        open_scorer(config, name="reward-0", registry=registry, usage=usage) as scorer,
        Admission(scorer.library, config.allowed_packages) as admission,
    ):
        api, callers = RewardApi(scorer.library, registry, admission, usage), Callers(service_token, config.tokens)
        transport = httpx.ASGITransport(app=rest_app(api, callers, config.calls_per_minute))
        async with RestClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield client, scorer, registry
