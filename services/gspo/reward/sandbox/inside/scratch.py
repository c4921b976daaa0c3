"""Folders that user code has filled: measuring and removing them.

User code can nest folders deeper than Python's stack and longer than the longest path, and close them to their owner.
So nothing here recurses or needs the path of the deepest folder. A folder is removed after its worker has ended.
"""

import os
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path

# Roughly the share of an empty file in the file system's tables.
_ENTRY_BYTES = 4096
# The content of a folder that cannot be read, or is too deep to reach, may have any size.
HIDDEN_BYTES = 2**62
# The largest size of one file, and of all files of a worker.
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
    """Bytes on disk of files that a process has open and that were removed from every folder.

    Args:
        folder: The folder that the process may write to: removed files elsewhere, such as replaced libraries, are not
            its own.
    """
    bytes_by_file: dict[tuple[int, int], int] = {}
    for entry in _descriptors(pid):
        with suppress(OSError):
            status = entry.stat()
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                bytes_by_file[status.st_dev, status.st_ino] = status.st_blocks * 512
    # The size of one that is mapped alone cannot be seen from outside: it counts as the largest there can be.
    for key in _removed_maps(pid, folder) - bytes_by_file.keys():
        bytes_by_file[key] = UNSEEN_BYTES
    return sum(bytes_by_file.values())


def _descriptors(pid: int) -> list[os.DirEntry[str]]:
    """The open files of a process. All its threads share one table, and the first of them may have ended."""
    tables = (_entries(f"{task.path}/fd") for task in _entries(f"/proc/{pid}/task"))
    return next((entries for entries in tables if entries), [])


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # gone meanwhile
        return []


def _removed_maps(pid: int, folder: Path) -> set[tuple[int, int]]:
    """Device and number of removed files of a folder that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return set()
    files = set()
    for line in maps.splitlines() if _DELETED in maps else ():  # addresses, rights, offset, device, number, path
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(bytes(folder)) and fields[5].endswith(_DELETED):
            major, _, minor = fields[3].partition(b":")
            files.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return files


def remove(folder: Path) -> None:
    """Remove a folder with its content, but for files that another user owns."""
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
            opened = os.open(name, _OPEN, dir_fd=top)
            try:
                for inner in _unlink_files(opened):
                    moved = next(new_names)
                    os.rename(inner, moved, src_dir_fd=opened, dst_dir_fd=top)
                    folders.append(moved)
            finally:
                os.close(opened)
            os.rmdir(name, dir_fd=top)


def _unlink_files(folder: int) -> list[str]:
    """The folders in a folder, opened to their owner; everything else in it is removed."""
    folders = []
    with os.scandir(folder) as listing:
        entries = list(listing)
    for entry in entries:
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=folder)
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders
