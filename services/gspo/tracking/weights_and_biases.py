"""Weights & Biases: one run there for all sessions of a run; offline it writes to `wandb/` without a network.

The x axis is the figure `step`: an evaluation arrives later than its step, and the service's own counter only grows.
"""

from pathlib import Path

import wandb

from gspo.common.config.schema import Config
from gspo.tracking.follower import FigureRecord, TrackerPosition, hyperparameters


class WeightsAndBiases:
    """One session of the run."""

    def __init__(self, run_dir: Path, config: Config, position: TrackerPosition) -> None:
        settings = config.tracking.wandb
        position.write()  # the id first: the session after a kill continues the same run
        self._num_sent = position.num_sent
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            name=config.name,
            id=position.run_id,
            resume="allow" if settings.mode == "online" else None,
            mode=settings.mode,
            dir=run_dir,
            config=hyperparameters(config),
            allow_val_change=True,  # some keys may change on resume
            settings=wandb.Settings(console="off", save_code=False, disable_git=True, silent=True),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def send(self, record: FigureRecord) -> None:
        self._run.log({**record.figures, "step": record.step}, step=self._num_sent)
        self._num_sent += 1

    def flush(self) -> None:
        """Do nothing: the service's own process has all logged records."""

    def close(self) -> None:
        """Wait until everything is on the disk, and online at the service."""
        self._run.finish()
