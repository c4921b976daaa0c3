"""The arithmetic example as `gspo run` runs it, with every service."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from gspo.common.host.machine import CACHE_ARGUMENT, GIB
from tests.gpu.machine_facts import ROOT
from tests.gpu.part_run import PartRun

_EXAMPLE = ROOT / "examples/arithmetic"
_ENGINE = {"gpu_memory_utilization": 0.1, CACHE_ARGUMENT: 4 * GIB, "enforce_eager": True}


def run(case: PartRun) -> None:
    """Cold start, run, and look at its summary."""
    folder = case.folder / f"demo-{case.device}"
    words = ["--steps", str(case.sizes.cold_start_steps)] if case.sizes.cold_start_steps else []
    began = time.monotonic()
    subprocess.run([sys.executable, str(_EXAMPLE / "cold_start.py"), str(folder), *words], check=True)
    case.note(cold_start_s=time.monotonic() - began)
    config = _config(case, folder)
    run_dir, summary = run_to_its_end(case, config)
    case.note(
        steps=summary["steps"], accuracy_before=summary["accuracy_before"], accuracy_after=summary["accuracy_after"]
    )
    case.require(summary["steps"] == case.sizes.demo_steps, f"{summary['steps']} steps were trained")
    case.require((run_dir / "report.html").exists(), "there is no report")
    gained = summary["accuracy_after"] - summary["accuracy_before"]
    case.judge("accuracy gained", gained, at_least=0.05)
    if case.on_gpu:
        case.require(gained > 0, "the model has not learned")
    case.note(**{name: value for name, value in summary["card_use"].items() if name in ("mfu", "learner_mfu")})


def run_to_its_end(
    case: PartRun, config: Path, disturb: Callable[[psutil.Process, Path], None] | None = None
) -> tuple[Path, dict[str, Any]]:
    """`gspo run` of a configuration: the run's directory and its summary. `run_s` is noted.

    Args:
        disturb: Called each 100 ms with the run's process and directory.
    """
    run_dir = config.parent / "runs" / yaml.safe_load(config.read_text())["name"]
    began = time.monotonic()
    with psutil.Popen([sys.executable, "-m", "gspo.cli", "run", str(config)]) as process:
        while process.poll() is None:
            time.sleep(0.1)
            if disturb is not None:
                disturb(process, run_dir)
    case.note(run_s=time.monotonic() - began)
    code = process.returncode
    case.require(code == 0, f"gspo run ended with exit code {code}; its output is in the log")
    return run_dir, json.loads((run_dir / "summary.json").read_text())


def _config(case: PartRun, folder: Path) -> Path:
    """The example's configuration, cut to the sizes, with as much of the sandbox as this machine has."""
    config: dict[str, Any] = yaml.safe_load((_EXAMPLE / "config.yaml").read_text())
    config["name"] = time.strftime("demo-%H%M%S")
    config["run"] = {"directory": str(folder / "runs"), "total_steps": case.sizes.demo_steps}
    config["evaluation"] |= {"every": 30, "num_answers": 1}
    config["reward"]["functions"][0]["path"] = str(_EXAMPLE / "reward.py")
    level = sandbox_level()
    case.note(sandbox=level)
    config["reward"]["sandbox_minimum"] = level
    if case.device == "cuda":
        config["generation"]["engine"] = {**_ENGINE, **case.engine}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def sandbox_level() -> str:
    """How far this machine can confine a reward function."""
    command = [sys.executable, "-m", "gspo.reward.sandbox"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return str(json.loads(done.stdout)["level"])
