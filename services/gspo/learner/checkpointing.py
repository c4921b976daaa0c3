"""Writes a checkpoint of the newest version when one is due or requested, and removes old ones.

produces: checkpoint folders, CheckpointDone.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

from gspo.common.service.app import Service
from gspo.common.streams.events import Events
from gspo.learner.step_report import StepClock
from gspo.learner.storage.run_directory import RunDir
from gspo.learner.trainer_thread import TrainerThread
from gspo.learner.training.trainer_api import TrainerApi
from gspo_core.advantage import RunningMoments
from gspo_proto.learner_pb2 import CheckpointReply
from gspo_proto.rollout_pb2 import CheckpointDone, Event


class CheckpointWriter:
    """Writes the checkpoints of one learner, between two steps.

    Args:
        moments: The assembler's running moments, which it updates in place.
    """

    def __init__(
        self,
        service: Service,
        run_dir: RunDir,
        trainer: TrainerThread,
        moments: RunningMoments,
        events: Events,
        clock: StepClock,
    ) -> None:
        self._config, self._activity = service.config.run, service.activity
        self._run_dir, self._trainer, self._moments = run_dir, trainer, moments
        self._events, self._clock = events, clock
        self._newest_step = run_dir.checkpoints.newest() or 0
        self._requested: asyncio.Future[CheckpointReply] | None = None

    def request(self) -> asyncio.Future[CheckpointReply]:
        """Ask for a checkpoint of the version after the current step."""
        self._requested = self._requested or asyncio.get_running_loop().create_future()
        # A caller that goes away leaves the reply to the others.
        return asyncio.shield(self._requested)

    @property
    def is_requested(self) -> bool:
        """Whether a caller waits for a checkpoint."""
        return self._requested is not None

    async def write_if_due(self, version: int) -> None:
        """Write a checkpoint of a version where one is due or requested."""
        if self.is_requested or version - self._newest_step >= self._config.checkpoint_every:
            await self.write(version)

    async def write(self, version: int) -> None:
        """Write a checkpoint of a version, unless it has one, and answer everyone who waits for one."""
        path = self._run_dir.checkpoints.path(version)
        if not self._run_dir.checkpoints.is_whole(version):
            began = time.monotonic()
            with self._activity.doing("checkpoint", f"step {version}"):
                await self._trainer.write("a checkpoint", lambda trainer: self._write_files(trainer, version))
                await asyncio.to_thread(
                    self._run_dir.prune,
                    keep_checkpoints=self._config.keep_checkpoints,
                    keep_log_steps=self._config.keep_log_steps,
                )
            self._clock.add_checkpoint(time.monotonic() - began)
            await self._events.send(Event(checkpoint_done=CheckpointDone(step=version, path=str(path))))
        self._newest_step = version
        if self._requested is not None:
            self._requested.set_result(CheckpointReply(step=version, path=str(path)))
            self._requested = None

    def _write_files(self, trainer: TrainerApi, version: int) -> None:
        folder = self._run_dir.checkpoints.begin(version)
        trainer.save(folder, {"moments": asdict(self._moments)})
        self._run_dir.checkpoints.finish(version)
