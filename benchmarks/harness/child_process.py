"""Measurements in processes of their own: each starts with fresh memory and its own environment, and leaves nothing.

`python -m benchmarks.harness.child_process FUNCTION ARGUMENTS RESULT` is the child: the name of a function with its
module, a JSON file with its keyword arguments, and the path for its result.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from benchmarks import CACHE, ROOT

_TAIL = 3000


class MeasurementError(RuntimeError):
    """A measurement failed or took too long."""


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, *, patience_s: float = 0.0
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that leads a group of its own, and end the whole group with the block.

    Args:
        patience_s: Longest wait after a SIGTERM for the process to end its children.
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
    function: str, arguments: Mapping[str, Any], *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> Any:
    """Call a function in a child process; its result, through JSON.

    Args:
        function: Its name with its module, `benchmarks.learner.logprobs.rounds`.

    Raises:
        MeasurementError: It failed, or took longer than `timeout_s`; with the end of its output.
    """
    folder = CACHE / "children"
    folder.mkdir(parents=True, exist_ok=True)
    inputs, output, log = (folder / f"{function}.{end}" for end in ("arguments.json", "result.json", "log"))
    inputs.write_text(json.dumps(arguments))
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.harness.child_process", function, str(inputs), str(output)]
    with started(command, log, environment) as process:
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(f"{function} took longer than {timeout_s:g} s.\n{tail(log)}") from error
    if code:
        raise MeasurementError(f"{function} ended with exit code {code}.\n{tail(log)}")
    return json.loads(output.read_text())


def tail(log: Path) -> str:
    """The end of a log."""
    return f"The end of {log}:\n{log.read_text(errors='replace')[-_TAIL:]}"


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty if it has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def processor_s(pid: int) -> float:
    """Processor time of a process and its descendants, ended ones included."""
    total = 0.0
    for process in process_tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def main() -> None:
    """Call the function, and write its result."""
    function, inputs, output = sys.argv[1:]
    module, _, name = function.rpartition(".")
    result = getattr(import_module(module), name)(**json.loads(Path(inputs).read_text()))
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
