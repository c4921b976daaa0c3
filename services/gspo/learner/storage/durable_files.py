"""Durable writes: on the disk when they return, and whole or absent after a kill at any moment.

They wait while the disk is full: the learner logs it, loses nothing, and continues once there is space. The wait has no
deadline: only the user can free space, and the log, `gspo status` and the terminal say that the run waits for it.
"""

import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import structlog
from safetensors import SafetensorError

from gspo.common.host.durable_write import TEMPORARY, fsync
from gspo.common.telemetry.activity import Activity, Kind
from gspo.runlog.run_log import Record, read_own_records

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
# How the system says that a disk, or a user's share of it, is full.
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Libraries that write tensors hide the system's error: then the free space decides.
_FULL_BELOW_BYTES = 1 << 20
_DISK_WAIT: tuple[Kind, str] = ("waiting", "disk")
log = structlog.get_logger()


def temporary(path: Path) -> Path:
    """The name that stands for `path` until it is whole, in the same folder. The next start removes such files."""
    return path.with_name(path.name + TEMPORARY)


def link_new(unfinished: Path, path: Path) -> None:
    """Give a written file its final name, once.

    Raises:
        FileExistsError: The name is taken; that file stays, and the unfinished one is removed.
    """
    try:
        fsync(unfinished)
        # Unlike a rename, link() never replaces a file.
        os.link(unfinished, path)
    finally:
        unfinished.unlink()
    fsync(path.parent)


def finite_or_null(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Figures for strict JSON, which has no NaN: a value that is not finite becomes null."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


class DiskSpace:
    """Writes that wait for free disk space. Its calls block, so they belong into threads.

    Args:
        activity: Shows the wait; with None there is no wait, and every error goes through.
        stopping: Whether the process has been asked to end: then an error goes through too.
    """

    def __init__(self, activity: Activity | None = None, stopping: Callable[[], bool] = lambda: False) -> None:
        self._activity, self._stopping = activity, stopping
        self._pause = threading.Event()
        # One token for each write in flight, whose changes need no lock.
        self._writing: set[object] = set()

    @property
    def is_writing(self) -> bool:
        """Whether a write is in flight, or waits for space."""
        return bool(self._writing)

    def retry_until_written(self, subject: str, where: Path, function: Callable[[], T]) -> T:
        """The result of `function`, called again until the disk has space for its files.

        Args:
            subject: Named in the message.
            where: A path on the disk.
        """
        writing = object()
        self._writing.add(writing)
        try:
            return self._retry(subject, where, function)
        finally:
            self._writing.discard(writing)

    def _retry(self, subject: str, where: Path, function: Callable[[], T]) -> T:
        pause_s, before = _FIRST_PAUSE_S, None
        while True:
            try:
                result = function()
                break
            except (OSError, RuntimeError, SafetensorError) as error:
                activity = self._activity
                if activity is None or self._stopping() or not _is_full(error, where):
                    raise
                if before is None:
                    before = activity.kind, activity.what, activity.detail
                    log.error(
                        "disk_full", reason=f"the disk has no space for {subject}", where=str(where), error=str(error)
                    )
                free = f"{_free_bytes(where) / 2**20:.1f} MiB are free under {where}"
                activity.set(*_DISK_WAIT, f"to have free space for {subject}: {free}")
                self._pause.wait(pause_s)
                # A checkpoint writes much before it fails.
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if before is not None and self._activity is not None:
            log.warning("disk_space_freed", written=subject, where=str(where))
            # A write beside training waits beside other activities; the present one of those stays.
            if (self._activity.kind, self._activity.what) == _DISK_WAIT:
                self._activity.set(*before)
        return result


def _is_full(error: BaseException, where: Path) -> bool:
    """Whether an error means that the disk of a path is full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    # safetensors gives the system's error as text, and removes its unfinished file: then there is space again.
    if any(f"(os error {number})" in str(error) for number in _FULL):
        return True
    return _free_bytes(where) < _FULL_BELOW_BYTES


def _free_bytes(where: Path) -> int:
    """Free space on the disk of a path, or of the nearest folder above it that exists."""
    while not where.exists() and where != where.parent:
        where = where.parent
    return shutil.disk_usage(where).free


class JsonLines:
    """A file of one JSON object a line that only grows.

    Opening it cuts off a torn last line, whose writer was killed.

    Args:
        disk: Waits for free disk space.
    """

    def __init__(self, path: Path, disk: DiskSpace | None = None) -> None:
        self.path, self._disk = path, disk or DiskSpace()
        # Settlements come from the intake, and from the removal of steps beside training.
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        fsync(path.parent)
        data = path.read_bytes()
        num_whole = data.rfind(b"\n") + 1
        if num_whole < len(data):
            os.ftruncate(self._descriptor, num_whole)
            os.fsync(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._descriptor)

    def records(self, parse: Callable[[Mapping[str, Any]], Record]) -> list[Record]:
        """The records of all lines.

        Raises:
            ValueError: A line holds no such record: the learner did not write it.
        """
        return read_own_records(self.path, parse).records

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add lines; they are on the disk when this returns."""
        data = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()
        self._disk.retry_until_written(
            f"{len(data)} bytes of {self.path.name}", self.path, lambda: self._write_whole(data)
        )

    def _write_whole(self, data: bytes) -> None:
        """Write all of it, or nothing: a part of a line would corrupt the next one."""
        with self._lock:
            before = os.fstat(self._descriptor).st_size
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
                os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, before)
                raise
