"""`gspo run` as a user starts it, observed from outside: its log while it grows, and its end.

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

import pandas as pd
import yaml

from benchmarks.harness.child_process import MeasurementError, started, tail

START_S, STEP_S, END_S = 300.0, 300.0, 180.0
_LOOK_EVERY_S = 0.05
# After a SIGTERM the run drains and writes a checkpoint.
_DRAIN_S = 90.0


@dataclass(frozen=True)
class ObservedRun:
    """A run of another process."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path
    started_unix_s: float

    @property
    def redis_url(self) -> str:
        """The address of the run's Redis, once it has one."""
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

    def steps(self, after: int, last: int) -> pd.DataFrame:
        """The figures of the steps `after` + 1 to `last`; `duration_s` is from the end of the step before."""
        lines = self.lines("metrics.jsonl")[after - 1 : last]
        figures = pd.DataFrame([line["figures"] for line in lines])
        return figures.assign(duration_s=pd.Series([line["unix_s"] for line in lines]).diff())[1:]

    def rollouts(self, after: int, last: int, column: str) -> pd.Series[Any]:
        """A column of the step files of the steps `after` + 1 to `last`."""
        paths = [self.run_dir / "log" / f"step-{step:06d}.parquet" for step in range(after + 1, last + 1)]
        return pd.concat([pd.read_parquet(path, columns=[column], partitioning=None)[column] for path in paths])


def answer_tokens(lengths: pd.Series[Any]) -> dict[str, float]:
    """Median, mean and largest of the lengths of answers."""
    return {name: float(lengths.agg(name)) for name in ("median", "mean", "max")}


def logged(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The whole lines of a file in a run's log; none while it is not there."""
    path = run_dir / "log" / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def observed_run(config: Path, module: str = "", environment: Mapping[str, str] | None = None) -> Iterator[ObservedRun]:
    """A run of this configuration, which ends with the block, together with its processes.

    Args:
        module: Runs it instead of `gspo run`.
        environment: Further variables of it.
    """
    keys = yaml.safe_load(config.read_text())
    run_dir = config.parent / keys["run"]["directory"] / keys["name"]
    output = config.parent / "output.txt"
    program = [module] if module else ["gspo.cli", "run"]
    command = [sys.executable, "-m", *program, str(config), "--plain"]
    began = time.time()
    with started(command, output, environment, patience_s=_DRAIN_S) as process:
        yield ObservedRun(process, run_dir, output, began)


def finished_run(config: Path, timeout_s: float = START_S + STEP_S + END_S, **program: Any) -> ObservedRun:
    """Run this configuration to its end; `program` are further arguments of observed_run."""
    with observed_run(config, **program) as run:
        run.wait_for_end(timeout_s)
    return run
