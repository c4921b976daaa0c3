"""The sandboxes of one agent: each rollout has a new one, and one with too much memory is ended."""

from __future__ import annotations

import asyncio
import os
import resource
from contextlib import suppress

import structlog

from gspo.agents.agent_sandbox import AgentSandbox
from gspo.agents.player.loading import UnfitAgentError
from gspo.agents.player.task import Task
from gspo.agents.relay import Dial
from gspo.agents.worker import AgentFailedError, RolloutLostError
from gspo.common.config.gateway import AgentConfig
from gspo.common.network.accepting import RESERVED_DESCRIPTORS
from gspo.common.telemetry import metrics
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.memory_watch import MemoryWatch

# A sandbox that has just failed to start may fail again: the rollout goes back, and costs an attempt.
_PAUSE_S = 1.0
# Its own sockets and pipes.
_DESCRIPTORS_OF_A_SANDBOX = 12
_MAX_CONNECTIONS = 64
log = structlog.get_logger()


class AgentPool:
    """Plays `agent.workers` rollouts at a time, each in a new sandbox; use it as an asynchronous context.

    Sandboxes are started before their rollouts come. There is one more for each core, so that a rollout need not wait
    for the import of its agent.

    Args:
        gateway: Opens a connection to a gateway.

    Attributes:
        num_playing: Rollouts that are played now.
    """

    def __init__(self, config: AgentConfig, level: ConfinementLevel, gateway: Dial) -> None:
        self._config = config
        num_cores = os.cpu_count() or 1
        num_sandboxes = config.workers + min(config.workers, num_cores)
        max_connections = connections_each(num_sandboxes)
        watch = MemoryWatch()
        self.sandboxes = [AgentSandbox(config, level, gateway, watch, max_connections) for _ in range(num_sandboxes)]
        self.num_playing = 0
        self._starts = asyncio.Semaphore(num_cores)
        self._renewals: set[asyncio.Task[None]] = set()
        self._free: asyncio.Queue[AgentSandbox] = asyncio.Queue()
        for sandbox in self.sandboxes:
            self._free.put_nowait(sandbox)

    async def __aenter__(self) -> AgentPool:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for renewal in self._renewals:
            renewal.cancel()
        await asyncio.gather(*self._renewals, return_exceptions=True)
        await asyncio.gather(*(sandbox.close() for sandbox in self.sandboxes))

    async def start_all(self) -> None:
        """Start every sandbox, as many at a time as there are cores; one that does not start is tried again later."""
        await asyncio.gather(*map(self._start, self.sandboxes))

    async def _start(self, sandbox: AgentSandbox) -> None:
        async with self._starts:
            with suppress(RolloutLostError, UnfitAgentError):
                await sandbox.start()

    async def _renew(self, sandbox: AgentSandbox) -> None:
        try:
            await self._start(sandbox)
        finally:
            self._free.put_nowait(sandbox)

    async def play(self, task: Task) -> float | None:
        """Play a rollout in a new sandbox; its reward.

        Raises:
            AgentFailedError: The agent has failed.
            RolloutLostError: What played it has died.
        """
        sandbox = await self._free.get()
        self.num_playing += 1
        try:
            reward = await sandbox.play(task)
        except (RolloutLostError, UnfitAgentError) as error:
            metrics.AGENT_SANDBOXES_LOST.inc()
            log.warning("agent_lost", rollout=task.id, reason=str(error))
            await asyncio.sleep(_PAUSE_S)
            raise RolloutLostError(str(error)) from error
        finally:
            self.num_playing -= 1
            renewal = asyncio.create_task(self._renew(sandbox))
            self._renewals.add(renewal)
            renewal.add_done_callback(self._renewals.discard)
        if reward is None and self._config.weight is not None:
            raise AgentFailedError("invalid_return", "gave no reward, and agent.weight adds one to the score")
        return reward


def connections_each(num_sandboxes: int) -> int:
    """Connections of one sandbox, such that all sandboxes together leave the process descriptors for its own work."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    free = limit - RESERVED_DESCRIPTORS - _DESCRIPTORS_OF_A_SANDBOX * num_sandboxes
    return max(1, min(_MAX_CONNECTIONS, free // (2 * num_sandboxes)))  # each has two ends
