"""The process that outlives the command line by a moment: when that ends, however it ends, nothing of it stays.

It reads from its standard input the sessions that the command line's children lead, one number a line, negative when
a session has ended. The input closes with the command line's death. The guard then kills every process of those
sessions, and every process that carries the supervisor's id in its environment. Neither alone is enough: a process can
leave its session, and one that sets its title (Redis, vLLM's engine) overwrites its environment.
It is not a supervisor: it starts nothing and knows no service.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection

import psutil

SUPERVISOR_VARIABLE = "GSPO_SUPERVISOR"
# A process may fork while the others are killed; after so many rounds something else is wrong.
_ROUNDS, _ROUND_S = 50, 0.1


def processes_of(supervisor_id: str, sessions: Collection[int] = ()) -> list[psutil.Process]:
    """Every living process, zombies apart, that was started under this supervisor_id or is in one of these sessions."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and (
                os.getsid(process.pid) in sessions
                or (supervisor_id and process.environ().get(SUPERVISOR_VARIABLE) == supervisor_id)
            ):
                found.append(process)
    return found


def kill_processes_of(supervisor_id: str, sessions: Collection[int] = ()) -> None:
    """Kill them, until there are none."""
    for _ in range(_ROUNDS):
        left = processes_of(supervisor_id, sessions)
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_ROUND_S)


def kill_session(session: int) -> None:
    """Kill what is left of a session whose leader has ended."""
    kill_processes_of("", (session,))


def start_guard(supervisor_id: str) -> subprocess.Popen[str]:
    """Start the guard of this process; closing its standard input lets it sweep and end."""
    environment = {name: value for name, value in os.environ.items() if name != SUPERVISOR_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-m", "gspo.cli.processes.guard", supervisor_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        bufsize=1,
        env=environment,
        start_new_session=True,
    )


def main() -> None:
    """Wait, then sweep."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        session = int(line)
        if session > 0:
            sessions.add(session)
        else:
            sessions.discard(-session)
    kill_processes_of(sys.argv[1], sessions)


if __name__ == "__main__":
    main()
