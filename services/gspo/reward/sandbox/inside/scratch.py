"""Folders that user code has filled: how much is in them, and away with them, whatever it has made there.

Neither recurses nor needs a path to the bottom: folders in folders may be deeper than Python's stack and longer than a
path may be, and closed to their owner. Removing is for when their worker is gone.
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
# The largest that a file may be, and as much as all of a worker's may have.
UNSEEN_BYTES = 64 * 2**20
_LONGEST_PATH = 1024
_DELETED = b" (deleted)"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def size(folder: Path) -> int:
    """Bytes on disk below a folder, and _ENTRY_BYTES for each entry; links are not followed.

    Counting ends above UNSEEN_BYTES: that is too much already, and there may be millions of entries.
    """
    total, folders = 0, [str(folder)]
    while folders and total <= UNSEEN_BYTES:
        if len(path := folders.pop()) > _LONGEST_PATH:
            return HIDDEN_BYTES
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        total += _ENTRY_BYTES + entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                    if total > UNSEEN_BYTES:
                        break
        except (FileNotFoundError, NotADirectoryError):  # gone meanwhile
            continue
        except OSError:
            return HIDDEN_BYTES
    return total


def nameless_size(pid: int, folder: Path) -> int:
    """Bytes on disk of files that a process holds and no folder has any more.

    Args:
        folder: What the process may write to: removed files elsewhere, such as replaced libraries, are not its own.
    """
    held: dict[tuple[int, int], int] = {}
    for entry in _descriptors(pid):
        with suppress(OSError):
            found = entry.stat()
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                held[found.st_dev, found.st_ino] = found.st_blocks * 512
    # The size of one that is mapped alone cannot be seen from outside: it counts as the largest there can be.
    for key in _removed_maps(pid, folder) - held.keys():
        held[key] = UNSEEN_BYTES
    return sum(held.values())


def _descriptors(pid: int) -> list[os.DirEntry[str]]:
    """What a process has open. All its threads share one table, and the first of them may have ended."""
    tables = (_entries(f"{task.path}/fd") for task in _entries(f"/proc/{pid}/task"))
    return next((entries for entries in tables if entries), [])


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # gone meanwhile
        return []


def _removed_maps(pid: int, folder: Path) -> set[tuple[int, int]]:
    """Device and number of removed files of a folder that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return set()
    found = set()
    for line in maps.splitlines() if _DELETED in maps else ():  # addresses, rights, offset, device, number, path
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(bytes(folder)) and fields[5].endswith(_DELETED):
            major, _, minor = fields[3].partition(b":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return found


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
