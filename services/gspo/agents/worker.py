"""Plays the rollouts of a run: leases tasks at its gateway, runs an agent on each, and sends the rewards.

The standard library and httpx are all that it needs, so it works on machines without an engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx

from gspo.agents.player.task import Agent, Task

log = logging.getLogger(__name__)
# Longest wait of one call for a task; the gateway holds the call for so long.
_WAIT_S = 10.0
_CALL_S = 30.0
_PAUSE_S = 1.0
_MOST_TEXT = 4096


class RunUnreachableError(RuntimeError):
    """The gateway refuses the worker, or has not answered for too long."""


class _RunEndedError(RunUnreachableError):
    """The gateway is away since the run has ended."""


class AgentFailedError(Exception):
    """The agent has failed at a rollout, which then has no score; raised by agents that know more than an exception.

    Attributes:
        kind: A failure_kind of the gateway, such as memory.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class RolloutLostError(Exception):
    """The process that played a rollout has gone. Another worker may play it: the agent has not failed."""


@dataclass
class AgentWorker:
    """Plays rollouts of one run side by side.

    Args:
        agent: Plays a rollout and returns its reward, or None where reward functions score it.
        url: Of the gateway, such as http://127.0.0.1:8082.
        token: The run's shared token; empty for a run on this machine without one.
        rollouts: Rollouts at a time.
        patience_s: Time for which the gateway may be away.

    Attributes:
        counts: Rollouts that have ended, by how: finished, failed, lost.
    """

    agent: Agent
    url: str
    token: str = ""
    rollouts: int = 8
    patience_s: float = 120.0
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    counts: dict[str, int] = field(default_factory=lambda: {"finished": 0, "failed": 0, "lost": 0})
    _has_ended: bool = False
    _is_draining: bool = False

    def drain(self) -> None:
        """Take no more rollouts: `run` returns after those that are played."""
        self._is_draining = True

    async def run(self) -> None:
        """Play until the run has ended, or `drain` is called. A cancellation leaves the rollouts to other workers.

        Raises:
            RunUnreachableError: The gateway refuses the worker, or has not answered for `patience_s`.
        """
        limits = httpx.Limits(max_connections=2 * self.rollouts + 2)
        http = httpx.AsyncClient(base_url=self.url.rstrip("/"), timeout=_CALL_S, limits=limits)
        async with http, asyncio.TaskGroup() as tasks:
            for _ in range(self.rollouts):
                tasks.create_task(self._play_all(http))

    async def _play_all(self, http: httpx.AsyncClient) -> None:
        request = {"worker": self.name, "wait_s": _WAIT_S}
        while not self._is_draining:
            try:
                reply = await self._post(http, "/v1/tasks/lease", self.token, request, self.patience_s)
            except _RunEndedError:
                return
            if reply.status_code == HTTPStatus.GONE:
                self._has_ended = True
                return
            if reply.status_code == HTTPStatus.OK:
                await self._play(http, reply.json())
            elif reply.status_code != HTTPStatus.NO_CONTENT:
                raise RunUnreachableError(f"{self.url} gives no task: {reply.status_code} {reply.text[:_MOST_TEXT]}")

    async def _play(self, http: httpx.AsyncClient, lease: dict[str, Any]) -> None:
        """Play one rollout, with heartbeats beside, and send how it ended."""
        path, key, lease_s = f"/v1/tasks/{lease['id']}", lease.pop("key"), lease.pop("lease_s")
        task = Task(base_url=f"{str(http.base_url).rstrip('/')}/v1", api_key=key, **lease)
        beating = asyncio.create_task(self._beat(http, path, key, lease_s))
        try:
            result = await self._result(task)
            reply = await self._post(http, f"{path}/finish", key, result, lease_s)
        except (RunUnreachableError, RolloutLostError) as error:
            log.warning("rollout %s is lost: %s", task.id, error)
            self.counts["lost"] += 1
            if isinstance(error, RolloutLostError):
                with suppress(RunUnreachableError):  # its lease then ends by its time
                    await self._post(http, f"{path}/release", key, {}, lease_s)
            return
        finally:
            beating.cancel()
        if reply.is_success:
            self.counts["failed" if "failure" in result else "finished"] += 1
            return
        self.counts["lost"] += 1
        log.warning("the result of rollout %s is refused: %d %s", task.id, reply.status_code, reply.text[:_MOST_TEXT])
        if reply.status_code != HTTPStatus.GONE:
            raise RunUnreachableError(f"{self.url} refuses a result: {reply.status_code} {reply.text[:_MOST_TEXT]}")

    async def _result(self, task: Task) -> dict[str, Any]:
        """The body of `finish`: a reward, or how the agent failed.

        Raises:
            RolloutLostError: Neither: what played it has gone.
        """
        try:
            async with asyncio.timeout(task.timeout_s):
                return {"reward": await self.agent(task)}
        except TimeoutError:
            return {"failure": f"not finished after {task.timeout_s:g} s", "failure_kind": "timeout"}
        except RolloutLostError:
            raise
        except AgentFailedError as error:
            return {"failure": str(error)[:_MOST_TEXT], "failure_kind": error.kind}
        except Exception as error:  # the agent is the user's: its errors end its rollout alone
            log.warning("the agent failed at rollout %s", task.id, exc_info=error)
            return {"failure": f"{type(error).__name__}: {error}"[:_MOST_TEXT], "failure_kind": "exception"}

    async def _beat(self, http: httpx.AsyncClient, path: str, key: str, lease_s: float) -> None:
        """Renew the lease until cancelled; the result tells whether it was lost."""
        while True:
            await asyncio.sleep(lease_s / 3)
            with suppress(httpx.HTTPError):
                await http.post(f"{path}/heartbeat", json={}, headers=_bearer(key))

    async def _post(
        self, http: httpx.AsyncClient, path: str, key: str, body: dict[str, Any], patience_s: float
    ) -> httpx.Response:
        """The reply; a gateway that is away is called again.

        Raises:
            RunUnreachableError: It was away for `patience_s`, or is away after the end of the run.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                reply = await http.post(path, json=body, headers=_bearer(key))
                if reply.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
                    return reply
                problem = reply.text[:_MOST_TEXT]
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            if self._has_ended:
                raise _RunEndedError(problem)
            if time.monotonic() >= deadline_s:
                raise RunUnreachableError(f"{self.url} has not answered for {patience_s:g} s ({problem})")
            await asyncio.sleep(_PAUSE_S)


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
