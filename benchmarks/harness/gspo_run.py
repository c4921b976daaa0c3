"""`gspo run` as a user starts it, watched from outside: its log while it grows, and its end.

It measures nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness.child_process import MeasurementError, started, tail

START_S, STEP_S, END_S = 300.0, 300.0, 180.0
_LOOK_EVERY_S = 0.05
# After a SIGTERM the run drains and writes a checkpoint.
_DRAIN_S = 90.0


@dataclass(frozen=True)
class ObservedRun:
    """A run under way."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path
    started_unix_s: float

    @property
    def redis_url(self) -> str:
        """Where the run's Redis is, once it has one."""
        facts = json.loads((self.run_dir / "services" / "supervisor.json").read_text())
        return str(facts["redis_url"])

    def wait_for_step(self, step: int, timeout_s: float) -> None:
        """Wait until a step is in the metrics.

        Raises:
            MeasurementError: The run ended first, or it took too long.
        """
        deadline = time.monotonic() + timeout_s
        while len(self.lines("metrics.jsonl")) < step:
            if self.process.poll() is not None:
                raise MeasurementError(f"the run ended before step {step}. {tail(self.output)}")
            if time.monotonic() > deadline:
                raise MeasurementError(f"step {step} took longer than {timeout_s:g} s. {tail(self.output)}")
            time.sleep(_LOOK_EVERY_S)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait until the run has ended well.

        Raises:
            MeasurementError: It failed, or took too long.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(f"the run did not end within {timeout_s:g} s. {tail(self.output)}") from error
        if code:
            raise MeasurementError(f"the run ended with exit code {code}. {tail(self.output)}")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a file in the run's log; none while it is not there."""
        return logged(self.run_dir, name)


def logged(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The whole lines of a file in a run's log; none while it is not there."""
    path = run_dir / "log" / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def observed_run(config: Path, module: str = "", environment: Mapping[str, str] | None = None) -> Iterator[ObservedRun]:
    """A run of this configuration; at the end of the block it is ended, and with it everything it has started.

    Args:
        module: What runs it instead of `gspo run`.
        environment: Further variables of it.
    """
    given = yaml.safe_load(config.read_text())
    run_dir = config.parent / given["run"]["directory"] / given["name"]
    output = config.parent / "output.txt"
    program = [module] if module else ["gspo.cli", "run"]
    command = [sys.executable, "-m", *program, str(config), "--plain"]
    began = time.time()
    with started(command, output, environment, patience_s=_DRAIN_S) as process:
        yield ObservedRun(process, run_dir, output, began)


def finished_run(config: Path, timeout_s: float = START_S + STEP_S + END_S) -> ObservedRun:
    """Run this configuration to its end."""
    with observed_run(config) as run:
        run.wait_for_end(timeout_s)
    return run
