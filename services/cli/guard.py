"""The process that outlives the command line by a moment: when that ends, however it ends, nothing of it stays.

It waits for the end of its standard input, which closes with the command line's death, and then kills every
process that carries the run's mark in its environment: children, their children, and those that left their group.
Not a supervisor: it starts nothing and knows no service. Neighbour: supervisor.py starts it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil

MARK = "GSPO_SUPERVISOR"
# A process may fork while the others are killed; after so many rounds something else is wrong.
_ROUNDS, _ROUND_S = 50, 0.1


def marked(mark: str) -> list[psutil.Process]:
    """Every living process, zombies apart, that was started under this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_marked(mark: str) -> None:
    """Kill them, until there are none."""
    for _ in range(_ROUNDS):
        left = marked(mark)
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_ROUND_S)


def start_guard(mark: str) -> subprocess.Popen[bytes]:
    """Start the guard of this process; closing its standard input lets it sweep and end."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli.guard", mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def main() -> None:
    """Wait, then sweep."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_marked(sys.argv[1])


if __name__ == "__main__":
    main()
