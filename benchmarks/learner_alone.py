"""A child process: the learner's trainer by itself, on one logged step again and again.

No Redis, no log and no push. Neighbours: part_learner.py asks; services/learner/trainer.py is what is measured.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.children import serve
from services.common.config import Config
from services.common.configfile import read_config
from services.common.model_folder import model_folder
from services.learner.steplog import StepLog
from services.learner.trainer import Trainer

_STEP = 1


def measure(orders: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every training of the step, and of handing the weights over; the first one warms up."""
    config: Config = read_config(Path(orders["config"]))
    rows = StepLog(Path(orders["log"])).read(_STEP)
    began = time.monotonic()
    trainer = Trainer(config, model_folder(config.model), seed=config.seed)
    start_s = time.monotonic() - began
    rounds = []
    for _ in range(orders["rounds"]):
        began = time.monotonic()
        figures = trainer.train(_STEP, rows).figures
        trained = time.monotonic()
        trainer.policy()
        rounds.append({"seconds": trained - began, "policy_s": time.monotonic() - trained, "tokens": figures["tokens"]})
    return {"start_s": start_s, "rounds": rounds}


if __name__ == "__main__":
    serve(measure)
