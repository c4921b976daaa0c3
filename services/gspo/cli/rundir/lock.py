"""The lock of a run directory: one `gspo` works on it at a time, and says in the locked file where its Redis is."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from gspo.common.errors import InputError

SERVICES_DIR = "services"
_SUPERVISOR_NAME = "supervisor.json"


@contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Lock the run directory for this process while the block lasts.

    Raises:
        InputError: Another process has locked it, or it cannot be written.
    """
    with _supervisor_file(run_dir) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = supervisor_facts(run_dir).get("pid", "unknown")
            raise InputError(
                str(run_dir),
                f"is in use by another gspo (process {pid})",
                f"Look at it: gspo status {shlex.quote(str(run_dir))}. Or stop it first",
            ) from error
        yield


def _supervisor_file(run_dir: Path) -> TextIO:
    path = run_dir / SERVICES_DIR / _SUPERVISOR_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+")
    except OSError as error:
        raise InputError(
            "run.directory",
            f"{run_dir} cannot be written ({error.strerror}: {error.filename})",
            "Set it to a folder on a disk where you may write",
        ) from error


def is_run_dir_locked(run_dir: Path) -> bool:
    """Whether a running process has locked the run directory."""
    try:
        with lock_run_dir(run_dir):
            return False
    except InputError:
        return True


def write_supervisor_facts(run_dir: Path, redis_url: str) -> None:
    """Write the id of this process and the address of its Redis for other commands; the file keeps its lock."""
    path = run_dir / SERVICES_DIR / _SUPERVISOR_NAME
    path.write_text(json.dumps({"pid": os.getpid(), "redis_url": redis_url}))


def supervisor_facts(run_dir: Path) -> dict[str, Any]:
    """`pid` and `redis_url` of the newest supervisor; empty if none has started."""
    try:
        facts = json.loads((run_dir / SERVICES_DIR / _SUPERVISOR_NAME).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return dict(facts)
