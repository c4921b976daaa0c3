"""What this machine, or this container's share of it, has left: memory, and the GPUs that can be seen.

It starts no engine. Neighbours: the services' checks refuse by what it says, services/cli/findings.py reports.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import psutil

from services.common.errors import InputError

_TOOL_S = 15.0
_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written
# A container's limit, what is used of it, and what of that is file cache that gives way: cgroup v2, then v1.
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
    """Bytes that can still be had here: the machine's, or less under a container's limit."""
    return min(float(psutil.virtual_memory().available), _cgroup_free())


def shared_memory() -> int:
    """Bytes that /dev/shm may hold; a container has 64 MiB unless it is given more. 0 where it is not there."""
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


def vllm_for_gpus() -> str:
    """Version of the vLLM that is installed, where it runs on NVIDIA's GPUs alone; else empty.

    The CPU build is a package of another name; builds for other devices say so behind a plus sign.
    """
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""
    device = version.partition("+")[2]
    return version if not device or device.startswith("cu") else ""


def check_gpus_are_seen(key: str, gpus: list[int]) -> None:
    """Refuse an environment made for GPUs where there is none: vLLM would crash, and torch train on the CPU unasked.

    Raises:
        InputError: Names the key.
    """
    if (version := vllm_for_gpus()) and not gpus:
        raise InputError(
            key,
            f"this environment is made for GPUs (vllm {version}), and nvidia-smi sees none",
            "Give the container GPUs (NVIDIA's driver and container toolkit on the host; docker-compose.gpu.yml), or "
            "install gspo[cpu]",
        )


def visible_gpus() -> list[int]:
    """Bytes of memory of every GPU that a process here sees, in its order; empty where there is none."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = [int(line) << 20 for line in printed.split() if line.isdigit()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if all(name.isdigit() for name in names):
        return [gpus[int(name)] for name in names if int(name) < len(gpus)]
    return gpus[: len(names)]  # given by UUID: as many, and rarely of unlike size
