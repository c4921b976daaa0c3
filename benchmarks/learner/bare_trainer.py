"""A child process: the learner's trainer by itself, on one logged step again and again.

No Redis, no log and no push.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.harness.child_process import serve
from gspo.common.config.loading import read_config
from gspo.common.config.schema import Config
from gspo.common.model.files import model_folder
from gspo.learner.storage.step_log import StepLog
from gspo.learner.training.trainer import Trainer
from gspo.learner.training.trainer_api import configured_hyperparameters

_STEP = 1


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every training of the step, and of handing the weights over; the first one warms up."""
    config: Config = read_config(Path(spec["config"]))
    rows = StepLog(Path(spec["log"])).read(_STEP)
    began = time.monotonic()
    trainer = Trainer(config, model_folder(config.model))
    start_s = time.monotonic() - began
    rounds = []
    for _ in range(spec["rounds"]):
        began = time.monotonic()
        figures = trainer.train(_STEP, rows, (), configured_hyperparameters(config, _STEP)).metrics
        trained = time.monotonic()
        trainer.policy()
        rounds.append({"seconds": trained - began, "policy_s": time.monotonic() - trained, "tokens": figures["tokens"]})
    return {"start_s": start_s, "rounds": rounds}


if __name__ == "__main__":
    serve(measure)
