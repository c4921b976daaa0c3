"""A server of the package `mcp` over both transports, and a hostile one written by hand, as tests start them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "mcp_programs"
TOOLS, HOSTILE = FOLDER / "tools.py", FOLDER / "hostile.py"
_START_S = 60.0


def command(kind: str = "") -> dict[str, Any]:
    """The keys of environment.mcp that start the server with tools, or a hostile one of a kind."""
    file = HOSTILE if kind else TOOLS
    return {"command": ["python", file.name, *([kind] if kind else [])], "reads": [str(file)]}


@contextmanager
def http_server(port: int = 0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The server with tools over streamable HTTP: its address and its process."""
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
    process = subprocess.Popen([sys.executable, TOOLS, str(port)], stderr=subprocess.DEVNULL)
    try:
        _wait_until_open(process, port)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


def _wait_until_open(process: subprocess.Popen[bytes], port: int) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, "the server has ended"
            time.sleep(0.05)
    raise TimeoutError(f"no server listens at {port}")
