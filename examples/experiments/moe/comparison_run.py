"""One run of the mixture-of-experts benchmark: the arithmetic example on a Qwen3-MoE, and the experts it chose.

GSPO and GRPO differ in the ratio and its clip, and in nothing else.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import CACHE
from benchmarks.harness.child_process import run_child
from benchmarks.harness.example import make_cold_start, write_example
from benchmarks.harness.gspo_run import finished_run, logged
from benchmarks.harness.section import Record, machine_facts

NUM_EXPERTS = 16
# The paper's own (arXiv 2507.18071, section 5): kind of ratio, clip below and above 1.
ALGORITHMS: dict[str, Record] = {
    "gspo": {"importance_sampling": "seq", "pg_clip_low": 3e-4, "pg_clip_high": 4e-4},
    "grpo": {"importance_sampling": "token", "pg_clip_low": 0.2, "pg_clip_high": 0.27},
    "gspo_token": {"importance_sampling": "seq_token", "pg_clip_low": 3e-4, "pg_clip_high": 4e-4},
}
COMPARED = ("gspo", "grpo")
FIGURES = (
    "reward_mean",
    "clipped_tokens",
    "clipped_sequences",
    "outside_clip_sequences",
    "token_log_ratio_std",
    "token_log_ratio_max",
    "log_ratio_std",
    "log_ratio_max",
    "sigma_token",
    "sigma_sequence",
    "grad_norm",
    "entropy",
)
DTYPES = ("bfloat16", "float32")
PRECISION: dict[str, Record] = {"generation": {"dtype": "bfloat16"}, "learner": {"dtype": "float32"}}
_RUN_S, _CHILD_S = 1200.0, 300.0

Experts = Sequence[Any]  # for each answer [T, layers, 2]


def measured_run(algorithm: str, seed: int, steps: int, *, again: bool = False) -> Record:
    """Train, unless the run came to its end before, and compare experts at the last step."""
    cold_start = make_cold_start(f"experts-{NUM_EXPERTS}", "--experts", str(NUM_EXPERTS))
    name = f"moe-{algorithm}-{seed}-{steps}"

    def write() -> Path:
        return write_example(
            name,
            cold_start,
            seed=seed,
            algorithm={**ALGORITHMS[algorithm], "loss_agg_mode": "seq-mean-token-mean"},
            staleness={"max_lag": 0},
            generation=PRECISION["generation"],
            learner=PRECISION["learner"],
            evaluation={"every": 20},
            # The checkpoint before the last step, from which experts.py continues.
            run={"total_steps": steps, "checkpoint_every": steps - 1},
        )

    run_dir = trained(name, steps, write, timeout_s=_RUN_S, again=again)
    return {
        "algorithm": algorithm,
        "seed": seed,
        **run_record(run_dir),
        # The float32 engine is a check of the method: once for each algorithm will do.
        "experts": compared_experts(run_dir, steps, DTYPES if seed == 0 else DTYPES[:1]),
    }


def trained(
    name: str, steps: int, write: Callable[[], Path], *, timeout_s: float, again: bool = False, **program: Any
) -> Path:
    """The directory of a run that came to its end, now or before.

    Args:
        write: Writes its configuration.
        program: Keyword arguments of finished_run.
    """
    run_dir = CACHE / "runs" / name / "run"
    if again or len(logged(run_dir, "metrics.jsonl")) < steps or not (run_dir / "summary.json").exists():
        finished_run(write(), timeout_s=timeout_s, **program)
    return run_dir


def run_record(run_dir: Path, names: Sequence[str] = FIGURES) -> Record:
    """Machine, figures over the steps, and sampled accuracy of a run."""
    lines, evaluations = logged(run_dir, "metrics.jsonl"), logged(run_dir, "evaluations.jsonl")
    return {
        "measured_unix_s": time.time(),
        "machine": machine_facts(),
        "series": {name: [line["figures"].get(name) for line in lines] for name in names},
        "accuracy": [
            {"step": record["step"], **{key: record["figures"].get(f"sampled_{key}") for key in ("mean", "stderr")}}
            for record in evaluations
        ],
    }


def compared_experts(run_dir: Path, step: int, dtypes: Sequence[str]) -> Record:
    """How many experts differ at the last step's tokens: engine against learner, and before against after the step."""
    folders = {name: str(run_dir.parent / name) for name in ("before", "after")}
    arguments = {"run_dir": str(run_dir), "step": step, **folders}
    learner = run_child("examples.experiments.moe.experts.learner_experts", arguments, timeout_s=_CHILD_S)
    of_engine = {"model": folders["before"], "inputs": learner["inputs"], "starts": learner["starts"]}
    engine = {
        dtype: run_child(
            "examples.experiments.moe.experts.engine_experts", {**of_engine, "dtype": dtype}, timeout_s=_CHILD_S
        )
        for dtype in dtypes
    }
    for folder in folders.values():
        shutil.rmtree(folder)
    return {
        "num_tokens": sum(len(answer) for answer in learner["before"]),
        **{dtype: changed(chosen, learner["before"]) for dtype, chosen in engine.items()},
        "one_step": changed(learner["before"], learner["after"]),
        "busiest": _busiest(learner["before"]),
    }


def changed(before: Experts, after: Experts) -> dict[str, float]:
    """Shares of tokens whose set of experts differs: in any layer (`tokens`), and over tokens and layers (`layers`)."""
    first, second = (np.sort(np.concatenate([np.asarray(answer) for answer in side])) for side in (before, after))
    differs_TL = (first != second).any(-1)
    return {"tokens": float(differs_TL.any(-1).mean()), "layers": float(differs_TL.mean())}


def _busiest(experts: Experts) -> float:
    """Share of a layer's choices that go to its most used expert, the mean over layers; 1/16 is perfect balance."""
    chosen_TLK = np.concatenate([np.asarray(answer) for answer in experts])
    layers = [np.bincount(chosen_TLK[:, layer].ravel(), minlength=NUM_EXPERTS) for layer in range(chosen_TLK.shape[1])]
    return float(np.mean([counts.max() / counts.sum() for counts in layers]))
