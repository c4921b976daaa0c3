"""Measurements in processes of their own: each starts with fresh memory and its own environment, and leaves nothing.

A child module takes two paths: of its spec as JSON, and of its results.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.sizes import CACHE, ROOT

_TAIL = 3000


class MeasurementError(RuntimeError):
    """A measurement did not come to its end."""


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, *, patience_s: float = 0.0
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a group of its own; the whole group is gone when the block ends.

    Args:
        patience_s: Longest wait after a SIGTERM for the process to end what it has started.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None and patience_s:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def run_child(
    module: str, spec: Mapping[str, Any], *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run `benchmarks.MODULE` on `spec`; its results.

    Raises:
        MeasurementError: It failed, or took longer than `timeout_s`; with the end of what it printed.
    """
    folder = CACHE / "children"
    folder.mkdir(parents=True, exist_ok=True)
    asked, answered, log = (folder / f"{module}.{end}" for end in ("spec.json", "results.json", "log"))
    asked.write_text(json.dumps(spec))
    answered.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{module}", str(asked), str(answered)]
    with started(command, log, environment) as process:
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(f"{module} took longer than {timeout_s:g} s.\n{tail(log)}") from error
    if code:
        raise MeasurementError(f"{module} ended with exit code {code}.\n{tail(log)}")
    results: dict[str, Any] = json.loads(answered.read_text())
    return results


def tail(log: Path) -> str:
    """The end of a log."""
    return f"The end of {log}:\n{log.read_text(errors='replace')[-_TAIL:]}"


def serve(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Read the spec, measure, and write the results: the main function of a child."""
    asked, answered = (Path(word) for word in sys.argv[1:])
    answered.write_text(json.dumps(measure(json.loads(asked.read_text()))))
