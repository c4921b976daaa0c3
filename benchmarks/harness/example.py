"""An example with other settings: its cold start and its configuration."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks import CACHE, ROOT
from benchmarks.harness.child_process import MeasurementError
from benchmarks.harness.workload import write_merged

ARITHMETIC = "arithmetic"
_COLD_START_S = 900.0


def make_cold_start(name: str, *options: str, example: str = ARITHMETIC, timeout_s: float = _COLD_START_S) -> Path:
    """The folder of an example's cold start, which is made at the first call.

    Raises:
        MeasurementError: It failed or took too long.
    """
    folder = ROOT / ".cache" / example / name
    command = [sys.executable, str(ROOT / "examples" / example / "cold_start.py"), str(folder), *options]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"the cold start took longer than {timeout_s:g} s") from error
    if done.returncode:
        raise MeasurementError(f"the cold start failed: {done.stderr or done.stdout}")
    return folder


def write_example(name: str, cold_start: Path, *, example: str = ARITHMETIC, **sections: Any) -> Path:
    """The example's configuration on a cold start, with other keys, in a folder of its own, which is emptied."""
    folder = CACHE / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = yaml.safe_load((ROOT / "examples" / example / "config.yaml").read_text()) | {"name": "run"}
    config["model"]["path"] = str(cold_start / "model")
    config["data"]["prompts"] = str(cold_start / "prompts.jsonl")
    for function in config["reward"]["functions"]:
        if "path" in function:
            function["path"] = str(ROOT / "examples" / example / function["path"])
    config["evaluation"] |= {"prompts": str(cold_start / "eval.jsonl"), "greedy": False}
    config["run"]["directory"] = "."
    for section, keys in json.loads((cold_start / "cold_start.json").read_text()).get("keys", {}).items():
        config[section] |= keys
    return write_merged(folder, config, sections)
