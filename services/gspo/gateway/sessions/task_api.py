"""The HTTP API of agents: lease a task, renew or end the lease, finish. And the check of every caller's key.

A worker shows the run's shared token to lease. The reply has a key of one rollout: with it the agent calls the model,
and the worker renews and finishes.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gspo.common.network.caller_key import WRONG_KEY, caller_key, is_token, refuse_key
from gspo.common.network.credentials import AGENT_KEY_PREFIX
from gspo.common.network.http_server import ASGIApp, Receive, Scope, Send, reply
from gspo.common.score_numbers import LARGEST_NUMBER
from gspo.common.service.app import Service
from gspo.gateway.sessions.recorder import Recorder
from gspo.gateway.sessions.session_store import Session, SessionLostError, SessionStore
from gspo_proto.agent_pb2 import AgentResult

_TASKS = "/v1/tasks"
_OF_ONE_TASK = ("/heartbeat", "/finish", "/release")
_LONGEST_WAIT_S, _LOOK_EVERY_S = 20.0, 0.1
_MOST_TEXT = 4096
_GONE = 410


class LeaseRequest(BaseModel):
    """A worker asks for a rollout to play."""

    model_config = ConfigDict(extra="forbid")

    worker: str = Field(
        max_length=200,
        min_length=1,
        pattern=r"^\P{C}+$",
        description="Name in logs and in the rollout's record",
    )
    wait_s: float = Field(0.0, ge=0, le=_LONGEST_WAIT_S, description="Time to wait for one")


class LeaseReply(BaseModel):
    """A rollout to play. `key` is the API key of its model calls; silence for `lease_s` gives it to another worker."""

    id: str
    key: str
    model: str
    attempt: int
    evaluation: str
    lease_s: float
    timeout_s: float
    prompt: str
    messages: list[dict[str, Any]]
    columns: dict[str, Any]


class FinishRequest(BaseModel):
    """The end of a rollout: with a reward, without one where reward functions score it, or with a failure."""

    model_config = ConfigDict(extra="forbid")

    reward: Annotated[float, Field(strict=True, ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)] | None = None
    failure: str = Field("", max_length=_MOST_TEXT)
    failure_kind: Literal["agent_failed", "crash", "exception", "invalid_return", "memory", "timeout"] = "agent_failed"


def task_routes(service: Service, store: SessionStore) -> APIRouter:
    """The routes below /v1/tasks."""
    router, config = APIRouter(prefix=_TASKS), service.config

    @router.post("/lease", response_model=None)
    async def lease(request: LeaseRequest) -> LeaseReply | Response:
        deadline_s = time.monotonic() + request.wait_s
        while True:
            if service.stopping.is_set():
                raise HTTPException(_GONE, "the run has ended: there are no more tasks")
            if (session := await store.lease(request.worker)) is not None:
                break
            if time.monotonic() >= deadline_s:
                return Response(status_code=204)
            await asyncio.sleep(_LOOK_EVERY_S)
        return LeaseReply(
            id=session.name,
            key=AGENT_KEY_PREFIX + session.key,
            model=config.gateway.model_name,
            attempt=session.attempt,
            evaluation=session.task.evaluation,
            lease_s=config.agent.lease_s,
            timeout_s=config.agent.timeout_s,
            prompt=session.task.prompt.text,
            messages=json.loads(session.task.prompt.messages_json or "[]"),
            columns=json.loads(session.task.prompt.columns_json or "{}"),
        )

    @router.post("/{name:path}/heartbeat", status_code=204)
    async def heartbeat(name: str, http: Request) -> None:
        await _with_key(name, http, store.renew)

    @router.post("/{name:path}/release", status_code=204)
    async def release(name: str, http: Request) -> None:
        await _with_key(name, http, store.release)

    @router.post("/{name:path}/finish", status_code=204)
    async def finish(name: str, request: FinishRequest, http: Request) -> None:
        if config.agent.weight is not None and request.reward is None and not request.failure:
            raise HTTPException(422, "reward is missing: the agent rewards its rollouts (agent.weight of the run)")
        result = AgentResult(
            reward=request.reward, failure=request.failure, failure_kind=request.failure_kind, unix_s=time.time()
        )
        await _with_key(name, http, lambda key: store.finish(key, result))

    return router


async def _with_key(name: str, http: Request, change: Callable[[str], Awaitable[None]]) -> None:
    """Change a rollout by its own key."""
    key = caller_key(http.scope).removeprefix(AGENT_KEY_PREFIX)
    if key.rpartition(".")[0] != name:
        raise HTTPException(403, f"send the key of {name}, which its lease has, as 'Authorization: Bearer KEY'")
    try:
        await change(key)
    except SessionLostError as error:
        raise HTTPException(_GONE, str(error)) from error


class CallerKeys:
    """Lets callers with the run's shared token pass, and agents with the key of a rollout, whose requests are recorded.

    Args:
        recorder: Makes the record of a request of a session.
    """

    def __init__(self, app: ASGIApp, token: str, store: SessionStore, recorder: Callable[[Session], Recorder]) -> None:
        self._app, self._token, self._store, self._recorder = app, token, store, recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/":  # clients see by it, without a key, whether the address answers
            await reply(send, 200, {"status": "alive"})
        elif why := await self._refusal(scope):
            await refuse_key(scope, send, why)
        else:
            await self._app(scope, receive, send)

    async def _refusal(self, scope: Scope) -> str:
        """Why a caller is refused; empty if it is not. An agent's request gets its recorder."""
        key, path = caller_key(scope), scope["path"]
        if not key.startswith(AGENT_KEY_PREFIX):
            return "" if is_token(key, self._token) else WRONG_KEY
        if path.startswith(f"{_TASKS}/"):
            if path.endswith(_OF_ONE_TASK):  # those check the key: a result may be sent twice
                return ""
            return "the key of a rollout leases no other: send the run's shared token"
        try:
            session = await self._store.session(key.removeprefix(AGENT_KEY_PREFIX))
        except SessionLostError as error:
            return str(error)
        scope.setdefault("state", {})["recorder"] = self._recorder(session)
        return ""
