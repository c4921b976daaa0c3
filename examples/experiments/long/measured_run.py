"""One run of the experiments on long answers: its training, and the record that is kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil

from benchmarks.harness.child_process import run_child
from benchmarks.harness.example import make_cold_start, write_example
from benchmarks.harness.gspo_run import logged
from benchmarks.harness.section import Record
from examples.experiments.long.declared_runs import ARMS, LongRun, Scale, best_rate
from examples.experiments.long.noisy_run import MODULE, VARIABLE
from examples.experiments.moe.comparison_run import (
    ALGORITHMS,
    DTYPES,
    FIGURES,
    PRECISION,
    compared_experts,
    run_record,
    trained,
)
from gspo.common.telemetry.advice import RULES
from gspo.common.telemetry.findings import HELD_OUT, HELD_OUT_ERROR

EXAMPLE = "long"
_PARTS = ("at_start", "at_end", "noise", "lag", "movement")
_CAUSES = (*(f"outside_clip_{part}" for part in _PARTS), "noise_clip")
_JUDGED = {name for rule in RULES for name in rule.figures} - {HELD_OUT, HELD_OUT_ERROR}  # by findings of a run
_FIGURES = tuple(dict.fromkeys((*FIGURES, *_CAUSES, "tokens", "response_tokens_mean", *sorted(_JUDGED))))
_RUN_S, _CHILD_S, _COLD_START_S = 4 * 3600.0, 600.0, 2 * 3600.0
_EVALUATE_EVERY = 20
_MISMATCH_EVERY = 8  # steps; without a lag, every step measures it


def measured_long_run(name: str, run: LongRun, scale: Scale, results: Mapping[str, Record], *, again: bool) -> Record:
    """Train, unless the run came to its end before.

    Raises:
        MeasurementError: The run failed, or the runs that tell its learning rate have no results.
    """
    rate = run.learning_rate or best_rate(run.arm, run.algorithm, results)
    busy_share = psutil.cpu_percent(interval=1.0) / 100
    options = [*scale.example, *run.example, "--experts", str(ARMS[run.arm])]
    cold_start = make_cold_start(
        "-".join(word.removeprefix("--") for word in options), *options, example=EXAMPLE, timeout_s=_COLD_START_S
    )
    program: dict[str, Any] = {"module": MODULE, "environment": {VARIABLE: str(run.sigma)}} if run.sigma else {}
    folder = f"long-{name}-{scale.steps}"
    run_dir = trained(
        folder,
        scale.steps,
        lambda: write_example(folder, cold_start, example=EXAMPLE, **sections(run, scale, rate)),
        timeout_s=_RUN_S,
        again=again,
        **program,
    )
    lines = logged(run_dir, "metrics.jsonl")
    record = {
        **{key: value for key, value in vars(run).items() if key != "learning_rate"},
        "learning_rate": rate,
        "steps": scale.steps,
        "busy_share": busy_share,
        **run_record(run_dir, _FIGURES),
        "seconds": [line["unix_s"] - lines[0]["unix_s"] for line in lines],
    }
    if run.experiment == "ratio":
        arguments = {"run_dir": str(run_dir), "model": str(cold_start / "model")}
        record["mismatch"] = run_child(
            "examples.experiments.long.answer_lengths.mismatch", arguments, timeout_s=_CHILD_S
        )
    if ARMS[run.arm]:
        record["experts"] = compared_experts(run_dir, scale.steps, DTYPES[:1])
    measured: Record = {**rounded(record), "measured_unix_s": record["measured_unix_s"]}
    return measured


def sections(run: LongRun, scale: Scale, rate: float) -> Record:
    """The sections of the configuration: those of the scale, and over them what this run changes."""
    changes: dict[str, Any] = {
        "algorithm": {
            **ALGORITHMS[run.algorithm],
            "loss_agg_mode": "seq-mean-token-mean",
            **run.algorithm_keys,
        },
        "staleness": {"max_lag": run.max_lag},
        "generation": PRECISION["generation"],
        "learner": {"dtype": run.learner_dtype, "learning_rate": rate},
        "evaluation": {"every": _EVALUATE_EVERY},
        # The checkpoint before the last step, from which the experts of that step are compared.
        "run": {"total_steps": scale.steps, "checkpoint_every": scale.steps - 1},
    }
    if run.max_lag:
        changes["learner"]["mismatch_every"] = _MISMATCH_EVERY
    sections = {name: {**scale.sections.get(name, {}), **keys} for name, keys in changes.items()}
    return {"seed": run.seed, **sections}


def rounded(value: Any) -> Any:
    """The same with five digits in each number; the page shows fewer, and the file stays small."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
