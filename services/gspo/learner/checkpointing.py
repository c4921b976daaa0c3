"""Writes a checkpoint of the newest version when one is due or requested, and removes old ones.

If the memory allows, training stands for a copy of the states alone, and one checkpoint at a time is written while the
next steps train. It counts when every rank's part is on the disk: then it gets its name, is announced and answered,
and older ones and their steps may go.

produces: checkpoint folders, CheckpointDone.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import structlog

from gspo.common.service.app import Service
from gspo.common.streams.events import Events
from gspo.learner.step_report import StepClock
from gspo.learner.storage.checkpoint_parts import GivenUpError
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.trainer_thread import TrainerThread
from gspo.learner.training.trainer_api import TrainerApi, WriteCheckpoint
from gspo_core.advantage import RunningMoments
from gspo_proto.learner_pb2 import CheckpointReply
from gspo_proto.rollout_pb2 import CheckpointDone, Event

log = structlog.get_logger()
_SUBJECT = "a checkpoint"


class CheckpointWriter:
    """Writes the checkpoints of one learner, which begin between two steps.

    Args:
        moments: The assembler's running moments, which it updates in place.
        is_overlapped: Whether the memory holds a copy of the states, to be written beside training.
        on_end: Called when a checkpoint that was written beside training is whole or has failed.
    """

    def __init__(
        self,
        service: Service,
        run_dir: RunDir,
        trainer: TrainerThread,
        moments: RunningMoments,
        events: Events,
        clock: StepClock,
        *,
        is_overlapped: bool,
        on_end: Callable[[], None],
    ) -> None:
        self._config, self._activity = service.config.run, service.activity
        self._run_dir, self._trainer, self._moments = run_dir, trainer, moments
        self._events, self._clock, self._is_overlapped, self._on_end = events, clock, is_overlapped, on_end
        # Of the newest checkpoint, also while it is written.
        self._newest_step = run_dir.checkpoints.newest() or 0
        self._requested: asyncio.Future[CheckpointReply] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._is_given_up = threading.Event()

    def request(self) -> asyncio.Future[CheckpointReply]:
        """Ask for a checkpoint of the version after the current step."""
        self._requested = self._requested or asyncio.get_running_loop().create_future()
        # A caller that goes away leaves the reply to the others.
        return asyncio.shield(self._requested)

    @property
    def is_requested(self) -> bool:
        """Whether a caller waits for a checkpoint that has not begun."""
        return self._requested is not None

    @property
    def has_failed(self) -> bool:
        """Whether the checkpoint that was written beside training has failed."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def raise_error(self) -> None:
        """Raise the error of the checkpoint that was written beside training, if it has failed."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def is_due(self, version: int) -> bool:
        return self.is_requested or version - self._newest_step >= self._config.checkpoint_every

    async def write(self, version: int, *, is_last: bool = False) -> None:
        """Write a checkpoint of a version, unless it has one, and answer everyone who waits for one.

        A write beside training returns when the states are copied. It first waits for the one before.

        Args:
            is_last: Whether it is whole when this returns in every case.
        """
        began = time.monotonic()
        with self._activity.doing("checkpoint", f"step {version}"):
            if self._writing is not None:
                # The end of this wait must not end the writing.
                await asyncio.shield(self._writing)
            requested, self._requested, self._newest_step = self._requested, None, version
            state = {"moments": asdict(self._moments)}
            if self._run_dir.checkpoints.is_whole(version):
                self._answer(version, requested)
            elif self._is_overlapped and not is_last:
                begin = self._run_dir.checkpoints.begin
                write = await self._trainer.write(_SUBJECT, lambda trainer: trainer.begin_save(begin(version), state))
                self._writing = asyncio.create_task(self._write_overlapped(version, write, began, requested))
                self._writing.add_done_callback(lambda _: self._on_end())
            else:
                await self._trainer.write(_SUBJECT, lambda trainer: self._write_files(trainer, version, state))
                await self._complete(version, requested)
                self._clock.end_checkpoint(time.monotonic() - began, 0.0)
        self._clock.add_between("checkpoint_s", time.monotonic() - began)

    async def close(self) -> None:
        """Wait for the files of this rank; what other ranks still owe is given up."""
        self._is_given_up.set()
        if self._writing is not None:
            await asyncio.wait([self._writing])
            if error := self._writing.exception():
                log.warning("checkpoint_not_written", reason=str(error), step=self._newest_step)

    async def _write_overlapped(
        self,
        version: int,
        write: WriteCheckpoint,
        began: float,
        requested: asyncio.Future[CheckpointReply] | None,
    ) -> None:
        """Write the copied states while the loop continues."""
        copied = time.monotonic()
        await self._trainer.write_overlapped(_SUBJECT, partial(self._write_copies, version, write))
        await self._complete(version, requested)
        now = time.monotonic()
        self._clock.end_checkpoint(now - began, now - copied)

    def _write_copies(self, version: int, write: WriteCheckpoint) -> None:
        if self._is_given_up.is_set():  # a wait for disk space ends too
            raise GivenUpError(f"the checkpoint of step {version} is not written: the learner ends")
        write(self._is_given_up.is_set)
        self._run_dir.checkpoints.finish(version)

    def _write_files(self, trainer: TrainerApi, version: int, state: dict[str, Any]) -> None:
        trainer.save(self._run_dir.checkpoints.begin(version), state)
        self._run_dir.checkpoints.finish(version)

    async def _complete(self, version: int, requested: asyncio.Future[CheckpointReply] | None) -> None:
        """A checkpoint is whole: remove older ones and their steps, announce it, and answer for it."""
        await asyncio.to_thread(
            self._run_dir.prune,
            keep_checkpoints=self._config.keep_checkpoints,
            keep_log_steps=self._config.keep_log_steps,
        )
        path = str(self._run_dir.checkpoints.path(version))
        await self._events.send(Event(checkpoint_done=CheckpointDone(step=version, path=path)))
        self._answer(version, requested)

    def _answer(self, version: int, requested: asyncio.Future[CheckpointReply] | None) -> None:
        if requested is not None:
            path = str(self._run_dir.checkpoints.path(version))
            requested.set_result(CheckpointReply(step=version, path=path))
