"""A small disk of a run's own, whose writes can be made to wait. It needs root.

The disk is a file with an ext4 file system on a loop device.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chaos.harness.network import call

# Of linux/fs.h.
_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878


@contextmanager
def small_disk(folder: Path, size_mb: int) -> Iterator[None]:
    """Mount it at a folder; with the block it is gone."""
    image = folder.with_name(f"{folder.name}.img")
    with image.open("wb") as file:
        file.truncate(size_mb << 20)
    # No block is reserved for root: the disk is to be full for every process.
    call("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    call("mount", "-o", "loop,noatime", str(image), str(folder))
    try:
        yield
    finally:
        call("umount", "-l", str(folder))
        image.unlink()


def freeze(folder: Path) -> None:
    """Let every write and sync to the disk of this folder wait until `thaw`. Reads from memory continue."""
    _control(folder, _FIFREEZE)


def thaw(folder: Path) -> None:
    """Undo `freeze`."""
    _control(folder, _FITHAW)


def _control(folder: Path, request: int) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(opened, request, 0)
    finally:
        os.close(opened)
