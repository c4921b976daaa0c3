"""Plays the rollouts of a run: leases tasks at its gateway, runs an agent on each, and sends the rewards.

The standard library and httpx are all that it needs, so it works on machines without an engine.
"""

import asyncio
import logging
import os
import socket
import time
import traceback
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
# As services/gspo/common/score_numbers.py has it, which needs more than this module may.
LARGEST_REWARD = 1e30
# Those that the gateway takes.
FAILURE_KINDS = ("agent_failed", "crash", "exception", "invalid_return", "memory", "timeout")


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
        url: Address of the gateway, such as http://127.0.0.1:8082.
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
        limits = httpx.Limits(max_connections=connections_of(self.rollouts))
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
        """Play one rollout, with heartbeats beside, and send how it ended. A fault ends this rollout alone."""
        path, key, lease_s = f"/v1/tasks/{lease['id']}", lease.pop("key"), lease.pop("lease_s")
        task = Task(base_url=f"{str(http.base_url).rstrip('/')}/v1", api_key=key, **lease)
        beating = asyncio.create_task(self._beat(http, path, key, lease_s))
        try:
            how = await self._send_result(http, path, key, await self._result(task), lease_s)
        except RunUnreachableError as error:
            log.warning("rollout %s is lost: %s", task.id, error)
            how = "lost"
        except RolloutLostError as error:
            log.warning("rollout %s is lost: %s", task.id, error)
            how = await self._release(http, path, key, lease_s)
        except Exception as error:  # of this program: the other rollouts go on
            log.error("rollout %s is lost", task.id, exc_info=error)
            how = await self._release(http, path, key, lease_s)
        finally:
            beating.cancel()
        self.counts[how] += 1

    async def _release(self, http: httpx.AsyncClient, path: str, key: str, lease_s: float) -> str:
        with suppress(RunUnreachableError):  # its lease then ends by its time
            await self._post(http, f"{path}/release", key, {}, lease_s)
        return "lost"

    async def _send_result(
        self, http: httpx.AsyncClient, path: str, key: str, result: dict[str, Any], lease_s: float
    ) -> str:
        """Send how a rollout ended; finished, failed or lost. A result that the gateway refuses is a failure."""
        reply = await self._post(http, f"{path}/finish", key, result, lease_s)
        if reply.is_client_error and reply.status_code != HTTPStatus.GONE:
            result = _failure("invalid_return", f"the gateway refuses its result: {reply.status_code} {reply.text}")
            log.warning("the result of %s is refused: %d %s", path, reply.status_code, reply.text[:_MOST_TEXT])
            reply = await self._post(http, f"{path}/finish", key, result, lease_s)
        if reply.is_success:
            return "failed" if "failure" in result else "finished"
        log.warning("the end of %s is refused: %d %s", path, reply.status_code, reply.text[:_MOST_TEXT])
        return "lost"

    async def _result(self, task: Task) -> dict[str, Any]:
        """The body of `finish`: a reward, or how the agent failed.

        Raises:
            RolloutLostError: Neither: what played it has gone.
        """
        try:
            async with asyncio.timeout(task.timeout_s):
                reward: Any = await self.agent(task)
            if reward is None or (isinstance(reward, int | float) and abs(reward) <= LARGEST_REWARD):
                return {"reward": reward if reward is None else float(reward)}
            return _failure("invalid_return", f"its reward is {reward!r:.100}, and no number within {LARGEST_REWARD:g}")
        except TimeoutError:
            return _failure("timeout", f"not finished after {task.timeout_s:g} s")
        except RolloutLostError:
            raise
        except AgentFailedError as error:
            return _failure(error.kind, str(error))
        except (Exception, SystemExit) as error:  # the agent is the user's: its errors end its rollout alone
            text = "".join(traceback.format_exception_only(error)).strip()  # also of one that cannot say what it is
            log.warning("the agent failed at rollout %s", task.id, exc_info=error)
            return _failure("exception", text)

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
                if not (reply.is_server_error or reply.status_code == HTTPStatus.TOO_MANY_REQUESTS):
                    return reply
                problem = reply.text[:_MOST_TEXT]
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            if self._has_ended:
                raise _RunEndedError(problem)
            if time.monotonic() >= deadline_s:
                raise RunUnreachableError(f"{self.url} has not answered for {patience_s:g} s ({problem})")
            await asyncio.sleep(_PAUSE_S)


def connections_of(rollouts: int) -> int:
    """Connections of a worker with so many rollouts at a time: a call of each with its heartbeat, and some to spare."""
    return 2 * rollouts + 2


def _failure(kind: str, text: str) -> dict[str, Any]:
    """A failure that the gateway takes: of a known kind, in whole characters, and not empty."""
    whole = text[:_MOST_TEXT].encode(errors="replace").decode() or "no reason is known"
    return {"failure": whole, "failure_kind": kind if kind in FAILURE_KINDS else "agent_failed"}


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
