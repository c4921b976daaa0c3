"""The free memory of this machine, or of this container's share of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

GIB = 1 << 30
_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written
# A container's limit, the memory in use, and the file cache in it that can be dropped: cgroup v2, then v1.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_memory() -> float:
    """Free bytes of the machine, or of a container's limit where that is less."""
    return min(float(psutil.virtual_memory().available), _cgroup_free())


def shared_memory() -> int:
    """Bytes that /dev/shm may hold; a container has 64 MiB by default. 0 if there is none."""
    return shutil.disk_usage(_SHM).total if _SHM.is_dir() else 0


def _cgroup_free() -> float:
    """Bytes that a container's limit leaves; infinite without one."""
    for limit, used, stat, key in _CGROUPS:
        try:
            facts = dict(line.split() for line in Path(stat).read_text().splitlines())
            return float(Path(limit).read_text()) - float(Path(used).read_text()) + float(facts.get(key, 0))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return float("inf")
