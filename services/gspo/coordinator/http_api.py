"""The run's HTTP API: its state, pause, resume, stop, and the newest rollouts."""

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
    """The app; services/gspo/common/service/health.py authorizes callers before."""
    app = FastAPIOffline(title="gspo coordinator")

    @app.get("/v1/state")
    async def get_state() -> dict[str, Any]:
        """Step, versions, slots, groups by settlement, evaluations, registered instances."""
        return await state()

    @app.get("/v1/status")
    async def get_status() -> dict[str, Any]:
        """The activity of every service and its time, the last step's time by cause, and the run's bottleneck."""
        return await status()

    @app.post("/v1/pause")
    async def pause() -> dict[str, bool]:
        """Issue no new groups; open groups are finished."""
        await redis.set(keys.paused, PAUSED_BY_USER)
        return {"paused": True}

    @app.post("/v1/resume")
    async def resume() -> dict[str, bool]:
        """Issue groups again."""
        await redis.delete(keys.paused)
        return {"paused": False}

    @app.post("/v1/stop", status_code=202)
    async def request_stop(body: StopBody) -> dict[str, str]:
        """End the run after the step in training, with a checkpoint."""
        await stop(body.reason)
        return {"stopping": body.reason}

    @app.get("/v1/rollouts")
    async def newest_rollouts(limit: Annotated[int, Query(ge=1, le=256)] = 16) -> list[dict[str, Any]]:
        """The newest scored rollouts, the newest first."""
        return await rollouts.newest(limit)

    return app
