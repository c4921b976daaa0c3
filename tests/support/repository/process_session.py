"""Runs a command as the leader of a session, so that none of its processes outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_session(
    command: Sequence[str], log: Path, limit_s: float, *, cwd: Path, env: Mapping[str, str] | None = None
) -> int | None:
    """The exit code of a command; None after its time limit. Its processes have a second for their own end."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    break
                time.sleep(1.0)
            process.wait()
