"""Part D, learning: the arithmetic example at every lag, with both denominators of the ratio.

One seed a case, so small differences are noise; the standard error of an accuracy stands beside it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.gspo_run import finished_run
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.sizes import CACHE, LAGS, ROOT

EXAMPLE = ROOT / "examples/arithmetic"
COLD_START = ROOT / ".cache/arithmetic/seed-0"
OLD_LOGPROBS = ("inference", "recompute")
_COLD_START_S, _RUN_S = 600.0, 1800.0
_EVALUATE_EVERY = 10


def cases(*, quick: bool, steps: int | None) -> Iterator[Measurement]:
    """Every lag with both denominators; quick: one case."""
    num_steps = 2 if quick else steps or 40
    for old_logprobs in OLD_LOGPROBS[:1] if quick else OLD_LOGPROBS:
        for max_lag in LAGS[1:2] if quick else LAGS:
            spec = (max_lag, old_logprobs, num_steps)
            yield Measurement(f"max_lag {max_lag}, old_logprobs {old_logprobs}, {num_steps} steps", _measure, spec)


def _measure(max_lag: int, old_logprobs: str, num_steps: int) -> dict[str, Any]:
    _make_cold_start()
    run = finished_run(_write_config(max_lag, old_logprobs, num_steps), timeout_s=_RUN_S)
    evaluations, steps = run.lines("evaluations.jsonl"), run.lines("metrics.jsonl")
    began = evaluations[0]["unix_s"]
    return {
        "max_lag": max_lag,
        "old_logprobs": old_logprobs,
        "num_steps": num_steps,
        "curve": [
            {
                "step": record["step"],
                "seconds": _seconds_of(record["step"], steps, began),
                "accuracy": record["figures"]["sampled_mean"],
                "stderr": record["figures"].get("sampled_stderr"),
            }
            for record in evaluations
        ],
        "rewards": [line["figures"]["reward_mean"] for line in steps],
        "clipped": [line["figures"]["clipped_sequences"] for line in steps],
    }


def _seconds_of(step: int, steps: list[dict[str, Any]], began: float) -> float:
    """When a version was made, from the end of the first evaluation on: what it scored was known a little later."""
    return 0.0 if step == 0 else float(steps[step - 1]["unix_s"]) - began


def _make_cold_start() -> None:
    command = [sys.executable, str(EXAMPLE / "cold_start.py"), str(COLD_START), "--seed", "0"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_COLD_START_S)
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"the cold start took longer than {_COLD_START_S:g} s") from error
    if done.returncode:
        raise MeasurementError(f"the cold start failed: {done.stderr or done.stdout}")


def _write_config(max_lag: int, old_logprobs: str, num_steps: int) -> Path:
    """The example's own configuration with this lag and this denominator, all held-out problems at every look."""
    folder = CACHE / "runs" / f"learning-{max_lag}-{old_logprobs}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    config["name"] = "run"
    config["model"]["path"] = str(COLD_START / "model")
    config["data"]["prompts"] = str(COLD_START / "prompts.jsonl")
    config["reward"]["functions"][0]["path"] = str(EXAMPLE / "reward.py")
    config["algorithm"]["old_logprobs"] = old_logprobs
    config["staleness"]["max_lag"] = max_lag
    config["evaluation"] |= {"prompts": str(COLD_START / "eval.jsonl"), "greedy": False, "every": _EVALUATE_EVERY}
    config["evaluation"].pop("limit_between", None)
    config["run"] |= {"directory": ".", "total_steps": num_steps}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
