"""Writes that wait while the disk is full: the learner logs it, loses nothing, and continues once there is space.

Every file written through it is whole or absent, so that it may be written again. The wait has no deadline: only the
user can free space, and the log, `gspo status` and the terminal say that the run waits for it.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog
from safetensors import SafetensorError

from gspo.common.telemetry.activity import Activity

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
# How the system says that a disk, or a user's share of it, is full.
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Libraries that write tensors hide the system's error: then the free space decides.
_FULL_BELOW_BYTES = 1 << 20
log = structlog.get_logger()


class DiskSpace:
    """Writes that wait for free disk space. Its calls block, so they belong into threads.

    Args:
        activity: Shows the wait; with None there is no wait, and every error goes through.
        stopping: Whether the process has been asked to end: then an error goes through too.
    """

    def __init__(self, activity: Activity | None = None, stopping: Callable[[], bool] = lambda: False) -> None:
        self._activity, self._stopping = activity, stopping
        self._pause = threading.Event()

    def retry_until_written(self, subject: str, where: Path, function: Callable[[], T]) -> T:
        """The result of `function`, called again until the disk has space for its files.

        Args:
            subject: Named in the message.
            where: A path on the disk.
        """
        pause_s, before = _FIRST_PAUSE_S, None
        while True:
            try:
                result = function()
                break
            except (OSError, RuntimeError, SafetensorError) as error:
                activity = self._activity
                if activity is None or self._stopping() or not is_full(error, where):
                    raise
                if before is None:
                    before = activity.kind, activity.what, activity.detail
                    log.error(
                        "disk_full", reason=f"the disk has no space for {subject}", where=str(where), error=str(error)
                    )
                free = f"{free_bytes(where) / 2**20:.1f} MiB are free under {where}"
                activity.set("waiting", "disk", f"to have free space for {subject}: {free}")
                self._pause.wait(pause_s)
                # A checkpoint writes much before it fails.
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if before is not None and self._activity is not None:
            log.warning("disk_space_freed", written=subject, where=str(where))
            self._activity.set(*before)
        return result


def is_full(error: BaseException, where: Path) -> bool:
    """Whether an error means that the disk of a path is full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return free_bytes(where) < _FULL_BELOW_BYTES


def free_bytes(where: Path) -> int:
    """Free space on the disk of a path, or of the nearest folder above it that exists."""
    while not where.exists() and where != where.parent:
        where = where.parent
    return shutil.disk_usage(where).free
