"""The whole system on one machine: a cold start, then reinforcement learning until the model can add.

Not part of the package: it makes the files that a user would bring, and calls `gspo run` on them as a user would.
cold_start.py makes model and problems, config.yaml or roll.yaml says how they are trained, reward.py what an answer is
worth.
"""

import json
import subprocess
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class Configuration(StrEnum):
    """The files beside this one."""

    OWN = "config.yaml"
    ROLL = "roll.yaml"


def write_config(file: Path, folder: Path, runs: Path, seed: int, steps: int | None) -> Path:
    """A configuration of the example, pointed at this cold start; returns its path."""
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    config["name"] += f"-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    config["seed"] = seed
    config["reward"]["functions"][0]["path"] = str(HERE / "reward.py")
    config["run"]["directory"] = str(runs)
    if steps is not None:
        config["run"]["total_steps"] = steps
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def add_phase(runs: Path, path: Path, cold_start_s: float) -> None:
    """Put the cold start beside the phases that `gspo run` measured."""
    summary = runs / yaml.safe_load(path.read_text(encoding="utf-8"))["name"] / "summary.json"
    if summary.is_file():
        facts = json.loads(summary.read_text(encoding="utf-8"))
        facts["wall_s"] = {"cold_start": round(cold_start_s, 3), **(facts.get("wall_s") or {})}
        summary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def main(
    seed: Annotated[int, typer.Option(min=0, help="Everything that is drawn: problems, weights, order, samples")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train; config.yaml's by default")] = None,
    runs: Annotated[Path, typer.Option(help="Folder for the run directory")] = ROOT / "runs",
    cache: Annotated[Path, typer.Option(help="Folder for cold starts, made once a seed")] = ROOT / ".cache/arithmetic",
    config: Annotated[Configuration, typer.Option(help="roll.yaml: ROLL's GSPO block")] = Configuration.OWN,
) -> None:
    """Make a small model that adds badly, train it by its rewards alone, and show what that gave."""
    folder = (cache / f"seed-{seed}").resolve()
    began = time.monotonic()
    done = subprocess.run([sys.executable, HERE / "cold_start.py", folder, "--seed", str(seed)], check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
    cold_start_s = time.monotonic() - began
    path = write_config(HERE / config.value, folder, runs.resolve(), seed, steps)
    done = subprocess.run([sys.executable, "-m", "gspo.cli", "run", path], check=False)
    add_phase(runs.resolve(), path, cold_start_s)
    raise typer.Exit(done.returncode)


if __name__ == "__main__":
    typer.run(main)
