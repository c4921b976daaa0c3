"""Calls the trainer in its one thread; meanwhile the event loop takes rollouts and pushes weights.

loop.py and checkpointing.py call TrainerThread, which calls rank_control.RankZero.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from gspo.learner.assembly.rows import Row
from gspo.learner.push.policy_weights import PolicyWeights, weights_from
from gspo.learner.storage.durable_files import DiskSpace
from gspo.learner.training.trainer_api import Hyperparameters, TrainerApi, TrainResult

T = TypeVar("T")
# Within the time after which a silent rank is given up.
_HEARTBEATS_IN_TIME = 4


class TrainerThread:
    """The trainer as coroutines.

    Args:
        trainer: On rank zero; every other rank makes each call with it.
        executor: The one thread in which the trainer was started.
        disk: Waits for free disk space.
        run_dir: The run directory, to which the trainer writes.
    """

    def __init__(self, trainer: TrainerApi, executor: ThreadPoolExecutor, disk: DiskSpace, run_dir: Path) -> None:
        self._trainer, self._executor, self._disk, self._run_dir = trainer, executor, disk, run_dir

    async def train(self, step: int, rows: Sequence[Row], hyperparameters: Hyperparameters) -> TrainResult:
        """Train the policy of version step - 1 on rows in training order.

        Raises:
            NotFiniteError: Too many mini-batches in a row had no finite loss or gradient norm.
        """
        return await self._call(lambda: self._trainer.train(step, rows, (), hyperparameters))

    async def weights(self, version: int) -> PolicyWeights:
        """The policy's weights in the generators' dtype, with their digest.

        Raises:
            NotFiniteError: A weight is infinite or no number.
        """
        return await self._call(lambda: weights_from(version, self._trainer.policy()))

    async def write(self, subject: str, function: Callable[[TrainerApi], None]) -> None:
        """Call a function that writes to the run directory, again and again until the disk has space for it.

        With other ranks an error goes through: they may be a call ahead, and all are started again.

        Args:
            subject: Named in the message while it waits.
        """
        write = partial(function, self._trainer)
        if not self._trainer.has_other_ranks:
            write = partial(self._disk.retry_until_written, subject, self._run_dir, write)
        await self._call(write)

    async def send_rank_heartbeats(self, rank_timeout_s: float) -> None:
        """Show the other ranks that this one runs, and notice if one of them does not; until cancelled."""
        while True:
            await asyncio.sleep(rank_timeout_s / _HEARTBEATS_IN_TIME)
            await self._call(self._trainer.rank_heartbeat)

    async def release_ranks(self) -> None:
        """Let the other ranks end."""
        await self._call(self._trainer.close)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)
