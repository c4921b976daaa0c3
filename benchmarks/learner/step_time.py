"""Part B, the learner: a step that a short run has logged is trained again by the trainer alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.child_process import run_child
from benchmarks.harness.gspo_run import finished_run
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.sizes import CACHE, DTYPES, LENGTHS, Dtype, Lengths
from benchmarks.harness.tables import middle
from benchmarks.harness.workload import write_config
from gspo.common.host.process_tuning import WAITING

_TIMEOUT_S = 900.0
# Threads at a barrier soon sleep in the service, because a generator wants the cores; alone, they could spin as well.
THREADS: dict[str, Mapping[str, str]] = {"service": WAITING, "spinning": {"OMP_WAIT_POLICY": "active"}}


def cases(*, quick: bool) -> Iterator[Measurement]:
    """Every length and arithmetic, with the service's thread policy and with threads that spin; quick: one case."""
    rounds = 2 if quick else 4
    for lengths in LENGTHS[:1] if quick else LENGTHS:
        for dtype in DTYPES if lengths == "fixed" and not quick else DTYPES[:1]:
            for threads in list(THREADS)[:1] if quick else THREADS:
                yield Measurement(f"{lengths}, {dtype}, {threads} threads", _measure, (lengths, dtype, threads, rounds))


def _measure(lengths: Lengths, dtype: Dtype, threads: str, rounds: int) -> dict[str, Any]:
    log = logged_step(lengths)
    config = write_config(f"learner-{lengths}-{dtype}", lengths, dtype)
    spec = {"config": str(config), "log": str(log), "rounds": rounds}
    found = run_child("learner.bare_trainer", spec, timeout_s=_TIMEOUT_S, environment=THREADS[threads])
    measured = found["rounds"][1:]
    return {
        "lengths": lengths,
        "dtype": dtype,
        "threads": threads,
        "start_s": found["start_s"],
        "seconds": middle([round_["seconds"] for round_ in measured]),
        "policy_s": middle([round_["policy_s"] for round_ in measured]),
        "tokens": measured[0]["tokens"],
        "tokens_per_s": middle([round_["tokens"] / round_["seconds"] for round_ in measured]),
        "rounds": found["rounds"],
    }


def logged_step(lengths: Lengths) -> Path:
    """The log folder of a run of one step; the run is made once and kept."""
    folder = CACHE / "runs" / f"logged-{lengths}"
    log = folder / "run" / "log"
    if not (folder / "run" / "summary.json").exists():
        finished_run(write_config(folder.name, lengths, "float32", staleness={"max_lag": 0}))
    return log
