"""The log lines of a service on standard error."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

_LOG = (
    "import structlog; from gspo.common.service.logs import set_up_logs; set_up_logs('info', name='learner-0');"
    "structlog.get_logger().info('first'); structlog.get_logger().info('second')"
)


def test_a_line_is_one_write() -> None:
    """Ranks write to one file: of two writes, another rank's line could lie between them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a message for each write
    ours.settimeout(10)
    with ours, theirs:
        subprocess.run([sys.executable, "-u", "-c", _LOG], stderr=theirs.fileno(), check=True, timeout=60)
        lines = [ours.recv(1 << 16).decode() for _ in range(2)]
    assert [line.endswith("\n") for line in lines] == [True, True]
    assert [json.loads(line)["event"] for line in lines] == ["first", "second"]
