"""The two faces of the reward service: REST for people who look at functions, gRPC for programs that want scores.

It decides nothing: scorer.py scores, the same way as for the streams. Neighbours: __main__.py opens both doors.
"""

from __future__ import annotations

from typing import Literal

import grpc
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from gspo_proto import reward_pb2, reward_pb2_grpc
from services.common.errors import nearest
from services.reward.scorer import Function, Scorer

GRPC_SERVICE = reward_pb2.DESCRIPTOR.services_by_name["Reward"].full_name
_NO_ENVIRONMENTS = "environments are not served by this version of the reward service; it scores finished rollouts"


class RewardView(BaseModel):
    """One reward function and how its calls went since the service started."""

    name: str
    version: str = Field(description="SHA-256 of the file's bytes")
    kind: Literal["function"] = "function"
    convention: Literal["trl", "verl"]
    entry: str = Field(description="Name of the function in its file")
    source: str = Field(description="Path of the file")
    weight: float
    calls: int
    errors: dict[str, int] = Field(description="Failed calls by how they failed")
    mean_s: float | None = Field(description="Mean time of a call; null before the first")
    slowest_s: float | None = Field(description="Longest time of a call; null before the first")


class RewardList(BaseModel):
    """Every reward function of this service."""

    rewards: list[RewardView]


def rest_app(scorer: Scorer) -> FastAPI:
    """GET /v1/rewards and GET /v1/rewards/{name}."""
    app = FastAPI(title="gspo reward")

    @app.get("/v1/rewards")
    async def list_rewards() -> RewardList:
        return RewardList(rewards=[view(function) for function in scorer.functions.values()])

    @app.get("/v1/rewards/{name}")
    async def get_reward(name: str) -> RewardView:
        if name not in scorer.functions:
            raise HTTPException(404, f"there is no reward function '{name}'. {nearest(name, scorer.functions)}")
        return view(scorer.functions[name])

    return app


def view(function: Function) -> RewardView:
    """What REST shows of a function."""
    source, sandbox, counts = function.source, function.sandbox, function.sandbox.counts
    calls = counts.results.total()
    return RewardView(
        name=source.name,
        version=source.version,
        convention=sandbox.signature.convention,
        entry=sandbox.signature.entry,
        source=str(source.path),
        weight=source.weight,
        calls=calls,
        errors={result: number for result, number in counts.results.items() if result != "ok"},
        mean_s=counts.seconds / calls if calls else None,
        slowest_s=counts.slowest_s if calls else None,
    )


class RewardServicer(reward_pb2_grpc.RewardServicer):
    """Scores on request."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> reward_pb2.ScoreReply:
        """A score for each rollout, in their order."""
        return reward_pb2.ScoreReply(scores=await self._scorer.score(request.rollouts))

    async def ResetEnvironment(  # type: ignore[override]
        self, request: reward_pb2.ResetRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        """UNIMPLEMENTED."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _NO_ENVIRONMENTS)

    async def StepEnvironment(  # type: ignore[override]
        self, request: reward_pb2.StepRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        """UNIMPLEMENTED."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _NO_ENVIRONMENTS)
