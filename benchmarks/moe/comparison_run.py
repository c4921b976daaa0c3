"""One run of the mixture-of-experts benchmark: the arithmetic example on a Qwen3-MoE, and what its experts did.

GSPO and GRPO differ in the ratio and its clip, and in nothing else.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.harness.child_process import MeasurementError, run_child
from benchmarks.harness.gspo_run import finished_run, logged
from benchmarks.harness.machine import machine_facts
from benchmarks.harness.sizes import CACHE, ROOT

EXAMPLE = ROOT / "examples/arithmetic"
NUM_EXPERTS = 16
COLD_START = ROOT / f".cache/arithmetic/experts-{NUM_EXPERTS}"
# The paper's own (arXiv 2507.18071, section 5): kind of ratio, clip below and above 1.
ALGORITHMS: dict[str, tuple[str, float, float]] = {"gspo": ("seq", 3e-4, 4e-4), "grpo": ("token", 0.2, 0.27)}
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
_COLD_START_S, _RUN_S, _CHILD_S = 900.0, 1200.0, 300.0

Experts = Sequence[Any]  # for each answer [T, layers, 2]


def measured_run(algorithm: str, seed: int, steps: int, *, again: bool = False) -> dict[str, Any]:
    """Train, unless the run came to its end before, and compare experts at the last step."""
    _make_cold_start()
    folder = CACHE / "runs" / f"moe-{algorithm}-{seed}-{steps}"
    run_dir = folder / "run"
    if again or len(logged(run_dir, "metrics.jsonl")) < steps or not (run_dir / "summary.json").exists():
        finished_run(_write_config(folder, algorithm, seed, steps), timeout_s=_RUN_S)
    lines, evaluations = logged(run_dir, "metrics.jsonl"), logged(run_dir, "evaluations.jsonl")
    return {
        "algorithm": algorithm,
        "seed": seed,
        "measured_unix_s": time.time(),
        "machine": machine_facts(),
        "series": {name: [line["figures"].get(name) for line in lines] for name in FIGURES},
        "accuracy": [
            {"step": record["step"], **{key: record["figures"].get(f"sampled_{key}") for key in ("mean", "stderr")}}
            for record in evaluations
        ],
        # The float32 engine is a check of the method: once for each algorithm will do.
        "experts": _compared_experts(folder, run_dir, steps, DTYPES if seed == 0 else DTYPES[:1]),
    }


def changed(before: Experts, after: Experts) -> dict[str, float]:
    """Shares of tokens whose set of experts differs: in any layer (`tokens`), and over tokens and layers (`layers`)."""
    one, two = (np.sort(np.concatenate([np.asarray(answer) for answer in side]), axis=-1) for side in (before, after))
    differs_TL = (one != two).any(-1)
    return {"tokens": float(differs_TL.any(-1).mean()), "layers": float(differs_TL.mean())}


def _compared_experts(folder: Path, run_dir: Path, steps: int, dtypes: Sequence[str]) -> dict[str, Any]:
    spec = {"run_dir": str(run_dir), "step": steps, "before": str(folder / "before"), "after": str(folder / "after")}
    learner = run_child("moe.learner_experts", spec, timeout_s=_CHILD_S)
    engine = {
        dtype: run_child(
            "moe.engine_experts",
            {"model": spec["before"], "dtype": dtype, "inputs": learner["inputs"], "starts": learner["starts"]},
            timeout_s=_CHILD_S,
        )["experts"]
        for dtype in dtypes
    }
    for name in ("before", "after"):
        shutil.rmtree(spec[name])
    return {
        "num_tokens": sum(len(answer) for answer in learner["before"]),
        **{dtype: changed(chosen, learner["before"]) for dtype, chosen in engine.items()},
        "one_step": changed(learner["before"], learner["after"]),
        "busiest": _busiest(learner["before"]),
    }


def _busiest(experts: Experts) -> float:
    """Share of a layer's choices that go to its most used expert, the mean over layers; 1/16 is perfect balance."""
    chosen_TLK = np.concatenate([np.asarray(answer) for answer in experts])
    layers = [np.bincount(chosen_TLK[:, layer].ravel(), minlength=NUM_EXPERTS) for layer in range(chosen_TLK.shape[1])]
    return float(np.mean([counts.max() / counts.sum() for counts in layers]))


def _make_cold_start() -> None:
    command = [sys.executable, str(EXAMPLE / "cold_start.py"), str(COLD_START), "--experts", str(NUM_EXPERTS)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_COLD_START_S)
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"the cold start took longer than {_COLD_START_S:g} s") from error
    if done.returncode:
        raise MeasurementError(f"the cold start failed: {done.stderr or done.stdout}")


def _write_config(folder: Path, algorithm: str, seed: int, steps: int) -> Path:
    """The example's configuration with this ratio and its clip, synchronous, generation alone in bfloat16."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    ratio, low, high = ALGORITHMS[algorithm]
    config |= {"name": "run", "seed": seed}
    config["model"]["path"] = str(COLD_START / "model")
    config["data"]["prompts"] = str(COLD_START / "prompts.jsonl")
    config["reward"]["functions"][0]["path"] = str(EXAMPLE / "reward.py")
    config["algorithm"] |= {
        "importance_sampling": ratio,
        "pg_clip_low": low,
        "pg_clip_high": high,
        "loss_agg_mode": "seq-mean-token-mean",
    }
    config["staleness"]["max_lag"] = 0
    config["generation"]["dtype"] = "bfloat16"
    config["learner"]["dtype"] = "float32"
    config["evaluation"] |= {"prompts": str(COLD_START / "eval.jsonl"), "greedy": False, "every": 20}
    # A checkpoint before the last step: moe_learner.py goes on from it.
    config["run"] |= {"directory": ".", "total_steps": steps, "checkpoint_every": steps - 1}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
