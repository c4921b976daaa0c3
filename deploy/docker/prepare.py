"""Makes the run directory that the services of docker-compose.yml share: the arithmetic example, ready to start.

Not a service: it runs once before them, and does nothing where the run is there already, so a second `up` goes on.
Neighbours: examples/arithmetic has the model and the problems, services/cli/rundir.py writes the directory.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from services.cli.rundir import hold, plan_run, prepare
from services.common.errors import InputError
from services.common.runtime import exit_bad_input


def write_inputs(example: Path, inputs: Path, run_dir: Path, token_file: Path) -> Path:
    """Put the example's reward function and configuration beside its model and prompts; the configuration's path."""
    shutil.copy(example / "reward.py", inputs / "reward.py")
    config = yaml.safe_load((example / "config.yaml").read_text(encoding="utf-8"))
    config["name"] = run_dir.name
    config["run"]["directory"] = str(run_dir.parent)
    # The services listen beyond loopback, and are reached with this token only.
    config["services"] = {"token_file": str(token_file)}
    path = inputs / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def write_token(path: Path) -> None:
    """A new secret, readable by its owner alone; one that is there stays."""
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(32), encoding="utf-8")


def main() -> None:
    """Make model, prompts, token and run directory, where they are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--example", type=Path, default=Path("/app/examples/arithmetic"))
    given = parser.parse_args()
    run_dir: Path = given.run_dir
    if (run_dir / "config.yaml").exists():
        print(f"{run_dir} is there; the run goes on")  # noqa: T201 - the log of the container
        return
    inputs, token_file = run_dir.parent / "inputs", run_dir.parent / "token"
    subprocess.run([sys.executable, given.example / "cold_start.py", inputs], check=True)
    write_token(token_file)
    try:
        plan = plan_run(write_inputs(given.example, inputs, run_dir, token_file), resume=False)
        with hold(plan.run_dir):
            prepare(plan)
    except InputError as error:
        exit_bad_input(error)
    print(f"{run_dir} is ready")  # noqa: T201


if __name__ == "__main__":
    main()
