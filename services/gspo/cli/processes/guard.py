"""The guard of a run: a process that kills all remaining processes of the command line when that ends or is killed.

It reads the sessions of the children from its standard input, one number a line, negative for an ended session. The
input closes when the command line ends. The guard then kills every process of those sessions, and every process with
the supervisor's id in its environment. Neither alone is enough: a process can leave its session, and a process that
sets its title (Redis, vLLM's engine) overwrites its environment.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection

import psutil

from gspo.common.host.module_command import SUPERVISOR_VARIABLE, module_command

# A process may fork while the others are killed, so the guard looks again.
_ROUNDS, _ROUND_S = 50, 0.1
# A shell gives a program in the background no input of its own accord.
_AS_ORPHAN = ("sh", "-c", 'exec 3<&0; "$@" <&3 &', "sh")


def processes_of(supervisor_id: str, sessions: Collection[int] = ()) -> list[psutil.Process]:
    """Every process, zombies apart, that was started under this supervisor_id or is in one of these sessions."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and (
                os.getsid(process.pid) in sessions
                or (supervisor_id and process.environ().get(SUPERVISOR_VARIABLE) == supervisor_id)
            ):
                members.append(process)
    return members


def kill_processes_of(supervisor_id: str, sessions: Collection[int] = ()) -> None:
    """Kill these processes until there are none."""
    for _ in range(_ROUNDS):
        remaining = processes_of(supervisor_id, sessions)
        if not remaining:
            return
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(_ROUND_S)


def start_guard(supervisor_id: str, *, as_orphan: bool = False) -> subprocess.Popen[str]:
    """Start the guard of this process; when its standard input closes, it kills and ends.

    Args:
        as_orphan: Make it no child of this process: it survives if this process is killed with its children. The
            returned process has only its input.
    """
    environment = {name: value for name, value in os.environ.items() if name != SUPERVISOR_VARIABLE}
    return subprocess.Popen(
        [*(_AS_ORPHAN if as_orphan else ()), *module_command("gspo.cli.processes.guard"), supervisor_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        bufsize=1,
        env=environment,
        start_new_session=True,
    )


def main() -> None:
    """Collect sessions until the input closes, then kill."""
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
