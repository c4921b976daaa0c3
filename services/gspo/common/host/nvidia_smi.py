"""Questions to nvidia-smi. The answer is empty if there is no NVIDIA driver, or if it fails.

https://docs.nvidia.com/deploy/nvidia-smi and https://docs.nvidia.com/datacenter/tesla/mig-user-guide
"""

import csv
import re
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass

_TOOL_S = 15.0
_MIB = 1 << 20
# Lines of `nvidia-smi -L`: a GPU, and below it the slices into which it is divided.
_GPU = re.compile(r"^GPU \d+: .*\(UUID: (?P<uuid>GPU-[^)]+)\)")
_SLICE = re.compile(r"^\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")
# Memory in the name of a slice's profile, such as 3g.40gb or 1g.10gb+me: GB, and a little less than there is.
_GIGABYTES = re.compile(r"\.(\d+)gb")


def query(table: str, fields: str) -> list[list[str]]:
    """The rows of `nvidia-smi --query-TABLE=FIELDS`, each with all fields.

    Args:
        table: "gpu" or "compute-apps".
        fields: Their names, separated by commas.
    """
    printed = _ask(f"--query-{table}={fields}", "--format=csv,noheader,nounits")
    rows = csv.reader(printed.splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == fields.count(",") + 1]


@dataclass(frozen=True)
class MigSlice:
    """A slice of a GPU (Multi-Instance GPU).

    Attributes:
        profile: Its size, such as "3g.40gb".
        total_bytes: About; None if the profile does not say it.
    """

    uuid: str
    profile: str

    @property
    def total_bytes(self) -> int | None:
        """The memory that the profile is named for."""
        size = _GIGABYTES.search(self.profile)
        return int(size[1]) * 10**9 if size else None


def mig_slices() -> dict[str, list[MigSlice]]:
    """The slices of each divided GPU, by the GPU's UUID."""
    slices: dict[str, list[MigSlice]] = defaultdict(list)
    gpu = ""
    for line in _ask("-L").splitlines():
        if words := _GPU.match(line):
            gpu = words["uuid"]
        elif words := _SLICE.match(line):
            slices[gpu].append(MigSlice(words["uuid"], words["profile"]))
    return slices


def programs_on(uuid: str) -> str:
    """The programs that hold memory on a GPU, as words; empty if the driver does not show them, as in a container."""
    rows = query("compute-apps", "gpu_uuid,pid,used_memory,process_name")
    words = []
    for gpu, pid, used, program in rows:
        if gpu == uuid:
            size = f": {int(used) * _MIB / (1 << 30):.1f} GiB" if used.isdigit() else ""
            words.append(f"process {pid}, {program}{size}")
    return "; ".join(words)


def _ask(*arguments: str) -> str:
    if not shutil.which("nvidia-smi"):
        return ""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_TOOL_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
