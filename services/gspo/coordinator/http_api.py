"""The run's REST face: its state, pause, resume, stop, and rollouts to look at.

It decides nothing: it shows what loop.py knows and writes what a user asks for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel, ConfigDict, Field
from redis.asyncio import Redis

from gspo.common.streams.keys import PAUSED_BY_USER, Keys
from gspo.coordinator.views import RecentRollouts

State = Callable[[], Awaitable[dict[str, Any]]]


class StopBody(BaseModel):
    """Why the run is stopped."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field("stopped by a user", min_length=1, max_length=500)


def make_http_api(
    redis: Redis,
    keys: Keys,
    *,
    state: State,
    status: State,
    stop: Callable[[str], Awaitable[None]],
    rollouts: RecentRollouts,
) -> FastAPI:
    """The app; who may call it is asked before (services/gspo/common/service/health.py)."""
    app = FastAPIOffline(title="gspo coordinator")

    @app.get("/v1/state")
    async def get_state() -> dict[str, Any]:
        """Step, versions, slots, groups by settlement, evaluations, members."""
        return await state()

    @app.get("/v1/status")
    async def get_status() -> dict[str, Any]:
        """What every service does or waits for and since when; the last step's time by cause; what bounds the run."""
        return await status()

    @app.post("/v1/pause")
    async def pause() -> dict[str, bool]:
        """Issue no new groups; what is open goes on."""
        await redis.set(keys.paused, PAUSED_BY_USER)
        return {"paused": True}

    @app.post("/v1/resume")
    async def resume() -> dict[str, bool]:
        """Issue groups again."""
        await redis.delete(keys.paused)
        return {"paused": False}

    @app.post("/v1/stop", status_code=202)
    async def request_stop(body: StopBody) -> dict[str, str]:
        """End the run after the step under way, with a checkpoint."""
        await stop(body.reason)
        return {"stopping": body.reason}

    @app.get("/v1/rollouts")
    async def newest_rollouts(limit: Annotated[int, Query(ge=1, le=256)] = 16) -> list[dict[str, Any]]:
        """The newest scored rollouts, the newest first."""
        return await rollouts.newest(limit)

    return app
