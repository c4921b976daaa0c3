"""A disk without room is waited for: the learner says so, loses nothing, and goes on when there is room again.

Whatever is written through it is whole or absent, so that it may be written again. The wait has no end of its own: only
the user can make room, and sees in the log, in `gspo status` and on the terminal that this is what the run waits for.
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
# Libraries that write tensors do not pass the system's word on: then it is asked how much room there is.
_FULL_BELOW_BYTES = 1 << 20
log = structlog.get_logger()


class DiskSpace:
    """Writes that wait for room. Its calls block, so they belong into threads.

    Args:
        activity: Shows the wait; None waits for nothing and lets every error through.
        stopping: Whether the process has been asked to end: then an error goes through too.
    """

    def __init__(self, activity: Activity | None = None, stopping: Callable[[], bool] = lambda: False) -> None:
        self._activity, self._stopping = activity, stopping
        self._pause = threading.Event()

    def retry_until_written(self, what: str, where: Path, function: Callable[[], T]) -> T:
        """The result of `function`, called again until the disk has room for what it writes.

        Args:
            what: Named in the message.
            where: A path on the disk that it writes to.
        """
        waited, pause_s = False, _FIRST_PAUSE_S
        before = self._activity and (self._activity.kind, self._activity.what, self._activity.detail)
        while True:
            try:
                result = function()
            except (OSError, RuntimeError, SafetensorError) as error:
                if self._activity is None or self._stopping() or not is_full(error, where):
                    raise
                detail = f"to have room for {what}: {free_bytes(where) / 2**20:.1f} MiB are free under {where}"
                if not waited:
                    log.error(
                        "disk_full", reason=f"the disk has no room for {what}", where=str(where), error=str(error)
                    )
                waited = True
                self._activity.set("waiting", "disk", detail)
                self._pause.wait(pause_s)
                # A checkpoint writes much before it fails.
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if waited and self._activity is not None and before:
                log.warning("disk_space_freed", written=what, where=str(where))
                self._activity.set(*before)
            return result


def is_full(error: BaseException, where: Path) -> bool:
    """Whether an error means that there is no room on the disk of a path."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return free_bytes(where) < _FULL_BELOW_BYTES


def free_bytes(where: Path) -> int:
    """Room on the disk of a path, or of the nearest folder above it that exists."""
    while not where.exists() and where != where.parent:
        where = where.parent
    return shutil.disk_usage(where).free
