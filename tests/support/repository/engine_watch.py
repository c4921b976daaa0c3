"""Print the start of every vLLM engine below a process: `engine_watch.py PID`, until that process ends.

A line is the time (Unix, s) at which the engine was first seen. An engine is found by the
title that vLLM gives its process. The process tree is read every two seconds: an engine takes longer to start.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

INTERVAL_S = 2.0
TITLE = b"EngineCore"


def parents() -> dict[int, int]:
    """Process id -> id of its parent, of every process."""
    ids = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            ids[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended
    return ids


def below(root: int) -> Iterator[int]:
    """Yield every process that `root` or one below it has started and that runs."""
    parent_of = parents()
    for process in parent_of:
        ancestor: int | None = process
        while ancestor := parent_of.get(ancestor or 0):
            if ancestor == root:
                yield process
                break


def engines(root: int) -> set[int]:
    """Return the ids of the engines below a process."""
    ids = set()
    for process in below(root):
        try:
            if TITLE in Path(f"/proc/{process}/cmdline").read_bytes().partition(b"\0")[0]:
                ids.add(process)
        except OSError:
            continue  # it has ended
    return ids


def main(root: int) -> None:
    """Print until the process ends; it has started this one."""
    known: set[int] = set()
    while os.getppid() == root:
        running = engines(root)
        for _ in running - known:
            print(time.time(), flush=True)  # noqa: T201 - read by run_report.py
        known = running
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main(int(sys.argv[1]))
