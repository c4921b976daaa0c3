"""Rates that the seconds of a plan follow from: a GPU's data sheet, and the shares of it that a run reaches.

`make gpu-test` measures the second kind. A record of its results file (docs/gpu.json) may have `"rates": {name: value}`
with the names of ASSUMED; those of the plan's GPU replace the assumed ranges. Each name's unit and way of measuring:

- `train_flops_share`: flops of a training step (`planned_times.training_flops`) over its seconds, without waits and
  weight updates, as a share of the GPU's bfloat16 flop/s.
- `mixture_flops_share`: the same of a mixture of experts.
- `prefill_flops_share`: flops of reading prompts (`ModelFlops.forward`) over the seconds of it, as such a share.
- `decode_bytes_share`: bytes that a pass of decoding must read (weights once, the cache of every sequence), over the
  seconds of its reading, as a share of the GPU's memory bytes/s.
- `decode_passes_s`: passes of decoding a second, if reading took no time: scheduling, sampling, starting of kernels.
- `to_host_bytes_s`: bytes of bfloat16 weights a second from a rank's GPU to host memory, and back under offload.
- `pack_bytes_s`: bytes of the policy a second that a thread of the learner looks through to find and pack changes.
- `wire_bytes_s`: bytes a second from the learner to generators over gRPC, all together.
- `stage_bytes_s`: bytes of the policy a second that a generator copies, changes and digests before the pause.
- `load_bytes_s`: bytes of the policy a second, on each GPU, that the engine loads while it pauses.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.common.errors import InputError
from gspo.common.host.gpu_kinds import GPU_KINDS, GpuKind
from gspo.common.plain_json import read_json_file

_GB = 1e9
# The kind that a size of memory in GB stands for, where the user names none.
_BY_MEMORY = {
    24: "NVIDIA L4",
    40: "NVIDIA A100-SXM4-40GB",
    48: "NVIDIA L40S",
    80: "NVIDIA H100 80GB HBM3",
    94: "NVIDIA H100 NVL",
    141: "NVIDIA H200",
    180: "NVIDIA B200",
}


@dataclass(frozen=True)
class Rate:
    """A range in which a rate lies.

    Attributes:
        low, high: Equal where it is measured.
        source: Where the range comes from.
        measured: On the plan's GPU, by `make gpu-test`.
    """

    low: float
    high: float
    source: str
    measured: bool = False


_H200 = "an H200, 2026-11-26, taken for every GPU"
_SMALLEST = "assumed: 520 beside reading at 414 tokens/s of Qwen3-0.6B alone on an H20 (Qwen's speed benchmark, SGLang)"
ASSUMED: Mapping[str, Rate] = {
    "train_flops_share": Rate(0.17, 0.5, f"{_H200}: 0.17 of 0.6 B uncompiled, 0.50 of 8 B's width compiled"),
    "mixture_flops_share": Rate(0.08, 0.22, "assumed: experts multiply few tokens each; half of dense or less"),
    "prefill_flops_share": Rate(0.3, 0.6, "assumed"),
    "decode_bytes_share": Rate(0.4, 0.8, "assumed"),
    "decode_passes_s": Rate(200, 520, _SMALLEST),
    "to_host_bytes_s": Rate(3.2 * _GB, 4.3 * _GB, _H200),
    "pack_bytes_s": Rate(0.26 * _GB, 0.36 * _GB, _H200),
    "wire_bytes_s": Rate(1.0 * _GB, 1.3 * _GB, "gRPC over loopback on two cores of an AMD EPYC, 2026-11-22"),
    "stage_bytes_s": Rate(0.88 * _GB, 1.05 * _GB, _H200),
    "load_bytes_s": Rate(1.1 * _GB, 2.0 * _GB, f"{_H200}, beside other jobs"),
}
_FILE = "--rates"


def find_kind(name: str | None, memory_gb: float | None) -> GpuKind:
    """The kind of a name, also of a part of it such as "H100 NVL", or the usual one with so much memory.

    Args:
        name: As nvidia-smi prints it.
        memory_gb: As in the kind's name; used if there is no name.

    Raises:
        InputError: There is no such kind in GPU_KINDS, or several.
    """
    if name is None:
        return _usual_kind(memory_gb)
    words = name.lower().split()
    partly = [known for known in GPU_KINDS if all(word in known.lower() for word in words)]
    # "L4" is a part of L40S and a word of L4.
    whole = [known for known in partly if {*words} <= {*known.lower().split()}]
    exactly = [known for known in partly if known.lower() == name.lower()] or whole or partly
    if len(exactly) == 1:
        return GPU_KINDS[exactly[0]]
    near = partly or difflib.get_close_matches(name, GPU_KINDS, n=3, cutoff=0.3) or list(GPU_KINDS)
    rule = f"{name!r} is {'a part of several names' if partly else 'no known GPU'}"
    raise InputError("--card", rule, f"Give one of {', '.join(near)}")


def _usual_kind(memory_gb: float | None) -> GpuKind:
    if memory_gb not in _BY_MEMORY:
        rule = f"{memory_gb or 0:g} GB stands for no known GPU"
        if memory_gb is None:
            rule = "is not given, and nvidia-smi shows no GPU of this machine"
        sizes = ", ".join(f"{size} ({name})" for size, name in _BY_MEMORY.items())
        raise InputError("--gpu-memory", rule, f"Name the GPU by --card, or give its GB: {sizes}")
    return GPU_KINDS[_BY_MEMORY[int(memory_gb)]]


def rates_of(gpu: GpuKind, results: Path | None = None) -> dict[str, Rate]:
    """Every rate of a kind of GPU: measured where a results file has it, else of another GPU, or assumed.

    Args:
        results: The file that `make gpu-test` wrote; None measures nothing.

    Raises:
        InputError: The file cannot be read, or has another content.
    """
    rates = dict(ASSUMED)
    for record in _records(results):
        if record.get("card") == gpu.name and record.get("passed"):
            source = f"measured: part {record['part']}, {record['date']}"
            measured = record.get("rates") or {}
            rates |= {name: Rate(measured[name], measured[name], source, True) for name in ASSUMED if name in measured}
    return rates


def _records(results: Path | None) -> list[dict[str, Any]]:
    if results is None:
        return []
    fix = "Give a file that `make gpu-test` wrote"
    try:
        records = read_json_file(results)
    except (OSError, ValueError) as error:
        raise InputError(_FILE, f"{results} cannot be read ({error})", fix) from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise InputError(_FILE, f"{results} holds another content than records", fix)
    return records
