"""Memory that the kernel holds for a process and charges to none, read from its files in /proc.

The kernel has no bound on locks on parts of files. Watches of epoll and inotify have one for all processes of a user,
also the service. Shared memory stays after a process has given up its pages, as long as it is mapped.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# A watch or a lock takes some 200 bytes, and its line in the file of its descriptor at least 45.
_BYTES_A_LETTER = 4
# Descriptors that wait in a unix socket are in no table of a process, and each may have watches of its own.
_SENT = re.compile(rb"scm_fds:\s*(\d+)")
_BYTES_OF_A_SENT = 2**18
_SHARED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s \S+ (\S+) (\d+) +/dev/zero \(deleted\)$", re.MULTILINE)


def descriptor_bytes(pids: Iterable[int], most: int) -> int:
    """Bytes behind the descriptors of processes: watches, locks, and descriptors that they have sent.

    Counting ends above `most`: the kernel writes some 20 MB of these files a second.
    """
    total = 0
    for path in (f"/proc/{pid}/fdinfo/{name}" for pid in pids for name in _names(f"/proc/{pid}/fdinfo")):
        with suppress(OSError):
            text = Path(path).read_bytes()
            total += len(text) * _BYTES_A_LETTER
            if sent := _SENT.search(text):
                total += int(sent[1]) * _BYTES_OF_A_SENT
        if total > most:
            break
    return total


def shared_mappings(pid: int) -> dict[tuple[bytes, bytes], int]:
    """Each piece of shared memory without a file that a process has mapped -> the bytes of its mappings."""
    sizes: dict[tuple[bytes, bytes], int] = {}
    with suppress(OSError):
        for start, end, device, number in _SHARED.findall(Path(f"/proc/{pid}/maps").read_bytes()):
            sizes[device, number] = sizes.get((device, number), 0) + int(end, 16) - int(start, 16)
    return sizes


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone
    except OSError:  # it has ended
        return []
