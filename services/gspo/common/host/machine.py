"""The machine of a process: its GPUs, by nvidia-smi and CUDA_VISIBLE_DEVICES, and its free memory or its container's.

It imports no torch and opens no GPU.
"""

from __future__ import annotations

import csv
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from gspo.common.errors import InputError, warn

VISIBLE = "CUDA_VISIBLE_DEVICES"
# How many generators run on each of the GPUs that a process sees, in their order, such as "1,0". `gspo run` sets it for
# the learner. If it is not set, as in a container, a process has its GPUs to itself.
GENERATORS_PER_GPU = "GSPO_GENERATORS_PER_GPU"
# vLLM's engine argument for its share of a GPU's memory, and its default.
SHARE_ARGUMENT, DEFAULT_SHARE = "gpu_memory_utilization", 0.92
# vLLM's engine arguments that multiply the GPUs of one engine.
PARALLEL_ARGUMENTS = ("tensor_parallel_size", "pipeline_parallel_size")
_TOOL_S = 15.0
_QUERY = "index,uuid,memory.total,memory.used"
_NONE = "-1"
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


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG slice of a GPU.

    Attributes:
        name: As CUDA_VISIBLE_DEVICES takes it: an index, a UUID, the name of a MIG slice.
        uuid: Empty where it is not known.
        total_bytes: Its memory; None where it is not known (a MIG slice).
        used_bytes: Of its memory, by any process.
    """

    name: str
    uuid: str = ""
    total_bytes: int | None = None
    used_bytes: int = 0


def visible_gpus() -> list[Gpu]:
    """The GPUs that a process started here would see, in its order; empty where there is none.

    Raises:
        InputError: CUDA_VISIBLE_DEVICES names a GPU that is not there, or names one twice.
    """
    if torch_is_for_cpus():
        return []
    return choose_gpus(_installed_gpus(), os.environ.get(VISIBLE))


def choose_gpus(installed: Sequence[Gpu], chosen: str | None) -> list[Gpu]:
    """Those of the installed GPUs that a value of CUDA_VISIBLE_DEVICES leaves, in its order.

    One that the value names by a UUID keeps that as its name, in full.

    As in CUDA, an empty entry or -1 ends the list. https://docs.nvidia.com/cuda/cuda-programming-guide, environment
    variables. CUDA also passes over everything from the first name on that it does not know; here that is an error.

    Args:
        chosen: The variable's value; None where it is not set.

    Raises:
        InputError: It names a GPU that is not there, or names one twice.
    """
    if chosen is None or not installed:
        return list(installed)
    gpus: list[Gpu] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry in ("", _NONE):
            break
        gpu = _named(entry, installed)
        if any(gpu.name == other.name or (gpu.uuid and gpu.uuid == other.uuid) for other in gpus):
            raise InputError(VISIBLE, f"{chosen!r} names {entry} twice", "Name every GPU once")
        gpus.append(gpu)
    return gpus


def _named(entry: str, installed: Sequence[Gpu]) -> Gpu:
    if entry.startswith("MIG-"):
        return Gpu(entry)
    # A UUID may be cut short as long as it is one GPU's alone.
    fitting = [
        gpu for gpu in installed if gpu.name == entry or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
    ]
    if len(fitting) != 1:
        known = ", ".join(f"{gpu.name} ({gpu.uuid})" for gpu in installed)
        raise InputError(VISIBLE, f"{entry!r} names no GPU of this machine", f"nvidia-smi shows: {known}")
    (gpu,) = fitting
    # In full: vLLM asks NVML for it, which knows no short form.
    return gpu if entry == gpu.name else replace(gpu, name=gpu.uuid)


def _installed_gpus() -> list[Gpu]:
    """Every GPU that NVIDIA's driver shows here, by index."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [row for row in csv.reader(printed.splitlines(), skipinitialspace=True) if len(row) == 4]
    return [
        Gpu(index, uuid, int(total) << 20 if total.isdigit() else None, int(used) << 20 if used.isdigit() else 0)
        for index, uuid, total, used in rows
        if index.isdigit()
    ]


def generators_per_gpu(gpus: Sequence[Gpu]) -> list[int]:
    """How many generators run on each of this process's GPUs, as `gspo run` has set it; 0 if it has set nothing."""
    counts = [int(word) for word in os.environ.get(GENERATORS_PER_GPU, "").split(",") if word.strip()]
    return [counts[place] if place < len(counts) else 0 for place in range(len(gpus))]


def vllm_for_gpus() -> str:
    """Version of the vLLM that is installed, where it runs on NVIDIA's GPUs alone; else empty.

    The CPU build is a package of another name; builds for other devices have a suffix behind a plus sign.
    """
    version = _installed_version("vllm")
    device = version.partition("+")[2]
    return version if not device or device.startswith("cu") else ""


def check_gpus_are_seen(key: str, gpus: Sequence[Gpu]) -> None:
    """Refuse an environment made for GPUs where there is none: vLLM would crash, and torch train on the CPU unasked.

    Raises:
        InputError: Names the key.
    """
    if (version := vllm_for_gpus()) and not gpus:
        raise InputError(
            key,
            f"this environment is made for GPUs (vllm {version}), and nvidia-smi sees none",
            "Give the container GPUs (NVIDIA's driver and container toolkit on the host; docker-compose.gpu.yml), "
            f"correct {VISIBLE} if it is set, or install gspo[cpu]",
        )


def warn_of_float32(key: str, dtype: str, gpus: Sequence[Gpu]) -> None:
    """Warn on standard error, as a check does, that a GPU is slow in float32."""
    if gpus and dtype == "float32":
        warn(
            f"{key} is float32: on GPUs bfloat16 is several times as fast, and FlashAttention takes no "
            "float32. Set it to bfloat16"
        )


def torch_is_for_cpus() -> bool:
    """Whether the engines of this environment leave every GPU alone: torch has a suffix behind a plus sign then."""
    return _installed_version("torch").endswith("+cpu")


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


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
