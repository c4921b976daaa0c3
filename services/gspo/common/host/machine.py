"""The machine of a process: its GPUs, by nvidia-smi and CUDA_VISIBLE_DEVICES, and its free memory or its container's.

It imports no torch and opens no GPU.
"""

import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from gspo.common.errors import InputError, warn
from gspo.common.host.nvidia_smi import mig_slices, programs_on, query
from gspo.common.host.packages import installed_version

VISIBLE = "CUDA_VISIBLE_DEVICES"
# How many generators run on each of the GPUs that a process sees, in their order, such as "1,0". `gspo run` sets it for
# the learner. If it is not set, as in a container, a process has its GPUs to itself.
GENERATORS_PER_GPU = "GSPO_GENERATORS_PER_GPU"
# vLLM's engine argument for its share of a GPU's memory, and its default.
SHARE_ARGUMENT, DEFAULT_SHARE = "gpu_memory_utilization", 0.92
# Without it vLLM measures the free memory for its cache, also the memory that another process takes or frees meanwhile.
CACHE_ARGUMENT = "kv_cache_memory_bytes"
# vLLM's engine arguments that multiply the GPUs of one engine.
PARALLEL_ARGUMENTS = ("tensor_parallel_size", "pipeline_parallel_size")
_QUERY = "index,uuid,memory.total,memory.used,name,mig.mode.current"
_NONE = "-1"
# Of a GPU's memory in use by a desktop or an idle program, beside which a run still fits.
_LITTLE_SHARE = 0.05
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
        total_bytes: Its memory, about for a MIG slice; None where it is not known.
        used_bytes: Memory in use, by any process.
        product: The kind of GPU, such as "NVIDIA H100 80GB HBM3"; of a MIG slice also its profile. Empty where it is
            not known.
    """

    name: str
    uuid: str = ""
    total_bytes: int | None = None
    used_bytes: int = 0
    product: str = ""


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
    is_uuid = entry.startswith(("GPU-", "MIG-"))
    # A UUID may be cut short if it is still the UUID of one GPU alone.
    fitting = [gpu for gpu in installed if gpu.name == entry or (is_uuid and gpu.uuid.startswith(entry))]
    if len(fitting) == 1:
        # In full: vLLM asks NVML for it, which knows no short form.
        return fitting[0] if entry == fitting[0].name else replace(fitting[0], name=fitting[0].uuid)
    if entry.startswith("MIG-") and ("/" in entry or not any(gpu.uuid.startswith("MIG-") for gpu in installed)):
        return Gpu(entry)  # the form of older drivers, or slices that nvidia-smi does not list
    known = ", ".join(gpu.name if gpu.name == gpu.uuid else f"{gpu.name} ({gpu.uuid})" for gpu in installed)
    raise InputError(VISIBLE, f"{entry!r} names no GPU of this machine", f"nvidia-smi shows: {known}")


def _installed_gpus() -> list[Gpu]:
    """Every GPU that NVIDIA's driver shows here, by index; the slices of a divided one in its place."""
    rows = [row for row in query("gpu", _QUERY) if row[0].isdigit()]
    slices = mig_slices() if any(mode == "Enabled" for *_, mode in rows) else {}
    gpus: list[Gpu] = []
    for index, uuid, total, used, product, _ in rows:
        if uuid in slices:
            gpus += [
                Gpu(part.uuid, part.uuid, part.total_bytes, product=f"{product} MIG {part.profile}")
                for part in slices[uuid]
            ]
            continue
        total_bytes = int(total) << 20 if total.isdigit() else None
        gpus.append(Gpu(index, uuid, total_bytes, int(used) << 20 if used.isdigit() else 0, product))
    return gpus


def describe_use(gpu: Gpu) -> str:
    """ ", of which other programs hold ..." in GiB, with their names if the driver shows them; empty if unused."""
    if not gpu.used_bytes:
        return ""
    programs = programs_on(gpu.uuid)
    return f", of which other programs hold {gpu.used_bytes / GIB:.1f}{f' ({programs})' if programs else ''}"


def choose_unused(gpus: Sequence[Gpu]) -> str:
    """ ", or choose ..." with the GPUs of which other programs hold little; empty if there are none."""
    unused = [gpu.name for gpu in gpus if gpu.used_bytes < _LITTLE_SHARE * (gpu.total_bytes or 0)]
    return f", or choose {len(unused)} with little in use: {VISIBLE}={','.join(unused)}" if unused else ""


def generators_per_gpu(gpus: Sequence[Gpu]) -> list[int]:
    """How many generators run on each of this process's GPUs, as `gspo run` has set it; 0 if it has set nothing."""
    counts = [int(word) for word in os.environ.get(GENERATORS_PER_GPU, "").split(",") if word.strip()]
    return [counts[place] if place < len(counts) else 0 for place in range(len(gpus))]


def engine_gpus(engine: Mapping[str, Any]) -> dict[str, str]:
    """The GPUs that an engine with these arguments uses here -> their kinds; vLLM takes the first visible ones.

    Raises:
        InputError: As visible_gpus.
    """
    return {gpu.uuid or gpu.name: gpu.product for gpu in visible_gpus()[: gpus_of_engine(engine)]}


def gpus_of_engine(engine: Mapping[str, Any]) -> int:
    """The number of GPUs that an engine with these arguments uses; vLLM itself refuses a fraction."""
    return math.prod(engine[key] for key in PARALLEL_ARGUMENTS if type(engine.get(key)) is int)


def vllm_for_gpus() -> str:
    """Version of the vLLM that is installed, where it runs on NVIDIA's GPUs alone; else empty.

    The CPU build is a package of another name; builds for other devices have a suffix behind a plus sign.
    """
    version = installed_version("vllm")
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
            "float32. Leave it out: the default on GPUs is bfloat16"
        )


def warn_of_idle_gpus(key: str, num_used: int, gpus: Sequence[Gpu]) -> None:
    """Warn on standard error, as a check does, of GPUs that a process has and does not use, as in a container."""
    if idle := len(gpus) - num_used:
        warn(f"{idle} of {len(gpus)} GPUs here stay idle: {key} uses {num_used}. Raise it, or give the rest to others")


def describe_device() -> str:
    """The device of the engines, such as "8 x NVIDIA H100 80GB HBM3".

    Raises:
        InputError: As for `visible_gpus`.
    """
    counts = Counter(gpu.product or "GPU" for gpu in visible_gpus())
    described = ", ".join(f"{count} x {product}" for product, count in counts.items())
    return described or ("GPUs, none of which is seen here" if vllm_for_gpus() else "CPU")


def torch_is_for_cpus() -> bool:
    """Whether the engines of this environment leave every GPU alone: torch has a suffix behind a plus sign then."""
    return installed_version("torch").endswith("+cpu")


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
