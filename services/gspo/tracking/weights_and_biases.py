"""Weights & Biases: one run there for a run here, over all its sessions; offline it writes `wandb/`, without network.

The x axis is the figure `step`: an evaluation arrives later than its step, and the service's own counter only grows.
Neighbour: follower.py says what to send.
"""

from __future__ import annotations

from pathlib import Path

import wandb

from gspo.common.config.schema import Config
from gspo.tracking.follower import TrackedRecord, hyperparameters
from gspo.tracking.position import TrackerPosition


class WeightsAndBiases:
    """One session of the run."""

    def __init__(self, run_dir: Path, config: Config, position: TrackerPosition) -> None:
        wanted = config.tracking.wandb
        position.write()  # the id first: a session that is killed is gone on with
        self._num_sent = position.num_sent
        self._run = wandb.init(
            project=wanted.project,
            entity=wanted.entity,
            group=wanted.group,
            tags=wanted.tags,
            name=config.name,
            id=position.run_id,
            resume="allow" if wanted.mode == "online" else None,
            mode=wanted.mode,
            dir=run_dir,
            config=hyperparameters(config),
            allow_val_change=True,  # some keys may change on resume
            settings=wandb.Settings(console="off", save_code=False, disable_git=True, silent=True),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def send(self, record: TrackedRecord) -> None:
        """Log a record's figures beside their step."""
        self._run.log({**record.figures, "step": record.step}, step=self._num_sent)
        self._num_sent += 1

    def flush(self) -> None:
        """Nothing: the service's own process has what was logged."""

    def close(self) -> None:
        """Wait until everything is on the disk, and online there."""
        self._run.finish()
