"""The section `learner`: the trainer repeats a step that a short run has logged, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import CACHE
from benchmarks.harness.child_process import run_child
from benchmarks.harness.gspo_run import finished_run
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import table
from benchmarks.harness.workload import NUM_MINI_BATCHES, Dtype, Lengths, cases, write_config
from gspo.common.host.process_tuning import WAITING

_TIMEOUT_S = 900.0
_STEP = 1
# Threads at a barrier soon sleep in the service, because a generator wants the cores; alone, they could spin as well.
THREADS: dict[str, Mapping[str, str]] = {"service": WAITING, "spinning": {"OMP_WAIT_POLICY": "active"}}
_TEXT = """
The trainer repeats a logged step in its own process ({mini_batches} mini-batches: forward, backward, optimizer, with \
DeepSpeed). Values are medians of the rounds after the first. Under bfloat16, matrix products are bfloat16 and weights \
float32. *Service* threads spin for 20 us at OpenMP's barriers and then sleep, as in the service; *spinning* threads \
never sleep.

{steps}
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Every length and dtype, with the service's thread policy and with threads that spin; quick: one case."""
    for lengths, dtype in cases(effort.quick):
        for threads in list(THREADS)[:1] if effort.quick else THREADS:
            arguments = (lengths, dtype, threads, 2 if effort.quick else 4)
            yield Measurement(f"{lengths}, {dtype}, {threads} threads", _measure, arguments)


def _measure(lengths: Lengths, dtype: Dtype, threads: str, rounds: int) -> Record:
    config = write_config(f"learner-{lengths}-{dtype}", lengths, dtype)
    arguments = {"config": str(config), "log": str(_logged_step(lengths)), "rounds": rounds}
    measured = run_child(f"{__name__}.train", arguments, timeout_s=_TIMEOUT_S, environment=THREADS[threads])
    frame = pd.DataFrame(measured["rounds"][1:])  # the first one warms up
    medians = frame.assign(tokens_per_s=frame.tokens / frame.seconds).median()
    return {"lengths": lengths, "dtype": dtype, "threads": threads, **medians.to_dict(), **measured}


def _logged_step(lengths: Lengths) -> Path:
    """The log folder of a run of one step, which is made at the first call."""
    run_dir = CACHE / "runs" / f"logged-{lengths}" / "run"
    if not (run_dir / "summary.json").exists():
        finished_run(write_config(run_dir.parent.name, lengths, "float32", staleness={"max_lag": 0}))
    return run_dir / "log"


def train(config: str, log: str, rounds: int) -> dict[str, Any]:
    """Time rounds of training one step, and of handing the weights over. A child process."""
    from gspo.common.config.loading import read_config
    from gspo.common.model.files import model_folder
    from gspo.learner.storage.step_log import StepLog
    from gspo.learner.training.trainer import Trainer
    from gspo.learner.training.trainer_api import configured_hyperparameters

    parsed = read_config(Path(config))
    rows = StepLog(Path(log)).read(_STEP)
    began = time.monotonic()
    trainer = Trainer(parsed, model_folder(parsed.model))
    hyperparameters = configured_hyperparameters(parsed, _STEP)
    start_s = time.monotonic() - began
    results = []
    for _ in range(rounds):
        began = time.monotonic()
        tokens = trainer.train(_STEP, rows, (), hyperparameters).metrics["tokens"]
        trained = time.monotonic()
        trainer.engine.policy()
        results.append({"seconds": trained - began, "policy_s": time.monotonic() - trained, "tokens": tokens})
    return {"start_s": start_s, "rounds": results}


def text(results: Results) -> str:
    """Seconds a step."""
    frame = pd.DataFrame(results["learner"])
    steps = table(
        ("", frame.lengths + ", " + frame.dtype + ", " + frame.threads + " threads", ""),
        ("s a step", frame.seconds, ".2f"),
        ("tokens/s", frame.tokens_per_s, ",.0f"),
        ("weights out, ms", frame.policy_s * 1e3, ".0f"),
    )
    return _TEXT.format(mini_batches=NUM_MINI_BATCHES, steps=steps)


LEARNER = PageSection("learner", "The learner alone", measurements, text)
