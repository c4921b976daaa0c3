"""The sandboxes of one agent: rollouts go to one that is free, and one with too much memory is ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import structlog

from gspo.agents.agent_sandbox import AgentSandbox
from gspo.agents.player.loading import UnfitAgentError
from gspo.agents.player.task import Task
from gspo.agents.relay import Dial
from gspo.agents.worker import AgentFailedError, RolloutLostError
from gspo.common.config.gateway import AgentConfig
from gspo.common.telemetry import metrics
from gspo.reward.sandbox.launch import ConfinementLevel

_MIB = 2**20
_MEASURE_EVERY_S = 0.2
# A sandbox that has just failed to start may fail again: the rollout goes back, and costs an attempt.
_PAUSE_S = 1.0
log = structlog.get_logger()


class AgentPool:
    """Plays rollouts in `agent.workers` sandboxes, one in each at a time; use it as an asynchronous context.

    Args:
        gateway: Opens a connection to a gateway.
        outer_url: Address of a relay to the gateway outside of sandboxes.
    """

    def __init__(self, config: AgentConfig, level: ConfinementLevel, gateway: Dial, outer_url: str) -> None:
        self._config = config
        self.sandboxes = [AgentSandbox(config, level, gateway, outer_url) for _ in range(config.workers)]
        self._free: asyncio.Queue[AgentSandbox] = asyncio.Queue()
        for sandbox in self.sandboxes:
            self._free.put_nowait(sandbox)

    async def __aenter__(self) -> AgentPool:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in self.sandboxes))

    @property
    def num_playing(self) -> int:
        """Rollouts that are played now."""
        return len(self.sandboxes) - self._free.qsize()

    async def start_all(self) -> None:
        """Start every sandbox, as many at a time as there are cores; one that does not start is tried again later."""
        slots = asyncio.Semaphore(os.cpu_count() or 1)

        async def start(sandbox: AgentSandbox) -> None:
            async with slots:
                with suppress(RolloutLostError, UnfitAgentError):
                    await sandbox.start()

        await asyncio.gather(*map(start, self.sandboxes))

    async def play(self, task: Task) -> float | None:
        """Play a rollout in a free sandbox; its reward.

        Raises:
            AgentFailedError: The agent has failed.
            RolloutLostError: What played it has died.
        """
        sandbox = await self._free.get()
        try:
            reward = await sandbox.play(task)
        except (RolloutLostError, UnfitAgentError) as error:
            metrics.AGENT_SANDBOXES_LOST.inc()
            log.warning("agent_lost", rollout=task.id, reason=str(error))
            await asyncio.sleep(_PAUSE_S)
            raise RolloutLostError(str(error)) from error
        finally:
            self._free.put_nowait(sandbox)
        if reward is None and self._config.weight is not None:
            raise AgentFailedError("invalid_return", "gave no reward, and agent.weight adds one to the score")
        return reward

    async def watch_memory(self) -> None:
        """End each sandbox whose processes have more memory than they may, until cancelled."""
        while True:
            await asyncio.sleep(_MEASURE_EVERY_S)
            by_pid = {sandbox.pid: sandbox for sandbox in self.sandboxes if sandbox.pid is not None}
            measured = await asyncio.to_thread(memory_below, by_pid.keys())
            for pid, num_bytes in measured.items():
                if num_bytes > self._config.memory_mb * _MIB and by_pid[pid].pid == pid:
                    log.warning("agent_over_memory", memory_mb=num_bytes // _MIB, limit_mb=self._config.memory_mb)
                    by_pid[pid].end_for_memory()


def memory_below(roots: Collection[int]) -> dict[int, int]:
    """Bytes of memory that the processes below some have written or share, each page once a process.

    Pages of files are not counted. A process that ends meanwhile counts as nothing.
    """
    if not roots:
        return {}
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone
        if name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
    totals = dict.fromkeys(roots, 0)
    for pid in parents:
        place = pid
        while place and place not in totals:
            place = parents.get(place, 0)
        if place:
            totals[place] += _memory_of(pid)
    return totals


def _memory_of(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"RssAnon:"):
                anonymous = int(line.split()[1])
            elif line.startswith(b"RssShmem:"):
                return (anonymous + int(line.split()[1])) * 1024
    return 0
