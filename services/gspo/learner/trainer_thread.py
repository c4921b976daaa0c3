"""Calls the trainer in its one thread; meanwhile the event loop takes rollouts and pushes weights.

loop.py and checkpointing.py call TrainerThread, which calls rank_control.RankZero.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from gspo.learner.assembly.rows import Row
from gspo.learner.push.shifts import LearnerShifts
from gspo.learner.storage.durable_files import DiskSpace
from gspo.learner.training.trainer_api import Hyperparameters, MakeVersion, TrainerApi, TrainResult

T = TypeVar("T")
# Within the time after which a silent rank is given up.
_HEARTBEATS_IN_TIME = 4


class TrainerThread:
    """The trainer as coroutines.

    Args:
        trainer: On rank zero; every other rank makes each call with it.
        shifts: On shared GPUs, a call that needs the states of training begins a shift, unless there is one.
        executor: The one thread in which the trainer was started.
        disk: Waits for free disk space.
        run_dir: The run directory, to which the trainer writes.
        keeps_copies: Whether the memory of a copy is kept for later ones.
    """

    def __init__(
        self,
        trainer: TrainerApi,
        shifts: LearnerShifts,
        executor: ThreadPoolExecutor,
        disk: DiskSpace,
        run_dir: Path,
        *,
        keeps_copies: bool,
    ) -> None:
        self._trainer, self._shifts, self._executor = trainer, shifts, executor
        self._disk, self._run_dir, self._keeps_copies = disk, run_dir, keeps_copies

    @property
    def gpus(self) -> Mapping[str, float | None]:
        """The GPU of each rank -> its peak flop/s, or None where that is unknown."""
        return self._trainer.gpus

    async def train(self, step: int, rows: Sequence[Row], hyperparameters: Hyperparameters) -> TrainResult:
        """Train the policy of version step - 1 on rows in training order.

        Raises:
            NotFiniteError: Too many mini-batches in a row had no finite loss or gradient norm.
        """
        await self._shifts.begin(f"step {step}")
        return await self._call(lambda: self._trainer.train(step, rows, (), hyperparameters))

    async def begin_version(self, version: int) -> MakeVersion:
        """Copy the weights in the generators' dtype to host memory; the result makes their version, in any thread."""
        await self._shifts.begin("making a version")
        return await self._call(lambda: self._trainer.begin_version(version, "", is_reused=self._keeps_copies))

    async def write(self, subject: str, function: Callable[[TrainerApi], T]) -> T:
        """Call a function that writes to the run directory, again and again until the disk has space for it.

        With other ranks an error goes through: they may be a call ahead, and all are started again.

        Args:
            subject: Named in the message while it waits.
        """
        await self._shifts.begin(subject)
        return await self.write_copies(subject, function)

    async def write_copies(self, subject: str, function: Callable[[TrainerApi], T]) -> T:
        """Call a function as `write` does that needs no states of training."""
        return await self._call(self._retried(subject, partial(function, self._trainer)))

    async def write_overlapped(self, subject: str, function: Callable[[], None]) -> None:
        """Call a function that writes as `write` does, in another thread, beside the trainer."""
        await asyncio.to_thread(self._retried(subject, function))

    def _retried(self, subject: str, write: Callable[[], T]) -> Callable[[], T]:
        if self._trainer.has_other_ranks:
            return write
        return partial(self._disk.retry_until_written, subject, self._run_dir, write)

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
