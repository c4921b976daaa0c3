"""Folders that user code has filled: how much is in them, and away with them, whatever it has made there.

Neither recurses nor needs a path to the bottom: folders in folders may be deeper than Python's stack and longer than a
path may be, and closed to their owner. Removing is for when their worker is gone.
Neighbours: supervisor.py looks and removes, services/reward/start.py removes what a killed supervisor left.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path

# What a file without content takes of the file system's tables, roundly.
_ENTRY_BYTES = 4096
# A folder that cannot be looked into, or takes long to get to, may hold anything.
HIDDEN_BYTES = 2**62
_LONGEST_PATH = 1024
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def size(folder: Path) -> int:
    """Bytes on disk below a folder, and _ENTRY_BYTES for each entry; links are not followed."""
    total, folders = 0, [str(folder)]
    while folders:
        if len(path := folders.pop()) > _LONGEST_PATH:
            return HIDDEN_BYTES
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        total += _ENTRY_BYTES + entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # gone meanwhile
            continue
        except OSError:
            return HIDDEN_BYTES
    return total


def nameless_size(pid: int) -> int:
    """Bytes on disk of files that a process holds open and no folder has any more."""
    total = 0
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(OSError):
                found = entry.stat()
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                    total += found.st_blocks * 512
    return total


def remove(folder: Path) -> None:
    """Remove a folder and all that is in it. What another user owns stays."""
    with suppress(OSError):
        top = os.open(folder, _OPEN)
        try:
            _empty(top)
        finally:
            os.close(top)
        folder.rmdir()


def _empty(top: int) -> None:
    """Empty a folder: the folders in its folders become its own, one after the other, so that none lies deep."""
    new_names = (f"{os.urandom(8).hex()}-{number}" for number in count())
    folders = _unlink_files(top)
    while folders:
        name = folders.pop()
        with suppress(OSError):
            found = os.open(name, _OPEN, dir_fd=top)
            try:
                for inner in _unlink_files(found):
                    moved = next(new_names)
                    os.rename(inner, moved, src_dir_fd=found, dst_dir_fd=top)
                    folders.append(moved)
            finally:
                os.close(found)
            os.rmdir(name, dir_fd=top)


def _unlink_files(folder: int) -> list[str]:
    """The folders in a folder, opened to their owner; everything else in it is removed."""
    folders = []
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=folder)
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders
