"""How a service's process waits for its start, between its check and its work.

`gspo run` starts the first process of each service before anything is sure: it checks the configuration, says so, and
imports what it needs while the others check. Then it is told where the run is, or it ends. What it hears and says goes
over its standard input, a socket.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

CHECKED = b"checked\n"


@dataclass(frozen=True)
class Start:
    """What a waiting process is told.

    Attributes:
        arguments: Its command line from now on, without the program.
        log: Where its output goes from now on; appended.
    """

    arguments: tuple[str, ...]
    log: str

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"


def report_checked() -> None:
    """Say that the check has found nothing."""
    with _other_end() as connection:
        connection.sendall(CHECKED)


def receive_start_command() -> None:
    """Wait to be told to start, and become that program: its command line, its log. Exits where nobody is left."""
    with _other_end() as connection, connection.makefile("rb") as lines:
        line = lines.readline()
    if not line.endswith(b"\n"):
        sys.exit(0)
    start = Start(**json.loads(line))
    sys.argv[1:] = start.arguments
    log = os.open(Path(start.log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)


def _other_end() -> socket.socket:
    return socket.socket(fileno=os.dup(0))
