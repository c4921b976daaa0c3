"""TensorBoard: writes event files to `tensorboard/` of the run directory; the x axis is the step.

`tensorboard --logdir runs` shows them. tensorboardX writes them without torch and the rest of TensorBoard; its
SummaryWriter is not used, because its flush returns before its queue is written.
"""

import time
from pathlib import Path
from typing import Any

import yaml
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import hparams, scalar, text

from gspo.common.config.schema import Config
from gspo.tracking.follower import FigureRecord, TrackerPosition, hyperparameters

FOLDER = "tensorboard"
# The hyperparameter view shows these beside the keys.
_SHOWN = ("train/reward_mean", "eval/sampled_mean", "eval/greedy_mean")


class TensorBoard:
    """One session, with its own event file."""

    def __init__(self, run_dir: Path, config: Config, position: TrackerPosition) -> None:
        (run_dir / FOLDER).mkdir(exist_ok=True)
        # The writer names files by the second: two sessions in one second would share a file.
        own = f".{time.time_ns()}"
        self._writer = EventsWriter(str(run_dir / FOLDER / "events"), own)
        if position.num_sent:
            # The reader drops later steps, which a killed session wrote and did not record as sent.
            self._write(position.last_step + 1, time.time(), session_log=SessionLog(status=SessionLog.START))
        else:
            self._describe(config)

    def send(self, record: FigureRecord) -> None:
        for name, value in record.figures.items():
            self._write(record.step, record.unix_s, summary=scalar(name, value))

    def flush(self) -> None:
        """Write everything to the disk."""
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _describe(self, config: Config) -> None:
        keys = hyperparameters(config)
        for summary in hparams(keys, dict.fromkeys(_SHOWN, 0.0)):
            self._write(0, time.time(), summary=summary)
        words = text("config", f"```\n{yaml.safe_dump(keys, sort_keys=False)}```")
        self._write(0, time.time(), summary=words)

    def _write(self, step: int, unix_s: float, **what: Any) -> None:
        self._writer.write_event(Event(step=step, wall_time=unix_s, **what))
