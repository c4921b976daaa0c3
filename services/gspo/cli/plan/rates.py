"""Rates that a plan's seconds follow from: of cards by their data sheets, and the shares of them that a run reaches.

`make gpu-test` measures the second kind. A record of its results file (docs/gpu.json) may have `"rates": {name: value}`
with the names of ASSUMED; those of the plan's card replace the assumed ranges. Each name's unit and way of measuring:

- `train_flops_share`: flops of a training step (`times.training_flops`) over its seconds, without waits and weight
  updates, as a share of the card's bfloat16 flop/s.
- `mixture_flops_share`: the same of a mixture of experts.
- `prefill_flops_share`: flops of reading prompts (`ModelFlops.forward`) over the seconds of it, as such a share.
- `decode_bytes_share`: bytes that a pass of decoding must read (weights once, the cache of every sequence), over the
  seconds of its reading, as a share of the card's memory bytes/s.
- `decode_passes_s`: passes of decoding a second, if reading took no time: scheduling, sampling, starting of kernels.
- `optimizer_bytes_share`: bytes that AdamW reads and writes in the card's memory, over its seconds, as such a share.
- `gather_bytes_s`: bytes a second that a card receives from the others of its host, when weights are gathered over
  ranks, gradients reduced, or heads exchanged.
- `small_sums_s`: sums over the cards of a generator a second, one after the other, of few bytes.
- `network_bytes_s`: bytes a second between hosts, for each card of a host.
- `to_host_bytes_s`: bytes of bfloat16 weights a second from a rank's card to host memory, and back under offload.
- `pack_bytes_s`: bytes of the policy a second that the learner looks through to find and pack changes.
- `wire_bytes_s`: bytes a second from the learner to generators over gRPC, all together.
- `stage_bytes_s`: bytes of the policy a second that a generator copies, changes and digests before the pause.
- `load_bytes_s`: bytes of the policy a second, on each card, that the engine loads while it pauses.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.common.errors import InputError
from gspo.common.host.gpu_kinds import GPU_KINDS, GpuKind
from gspo.common.plain_json import read_json_file

_GB = 1e9


# The card that a size of memory in GB stands for, where the user names none.
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
        measured: On the plan's card, by `make gpu-test`.
    """

    low: float
    high: float
    source: str
    measured: bool = False


# None of these ranges was measured on a GPU by this project.
_LINKED = "assumed: NVLink of 900 GB/s both ways, half of one way or less"
_UNLINKED = "assumed: PCIe 4.0 of 32 GB/s, half or less"
_NETWORK = "assumed: a NIC of 400 Gb/s for each card, four fifths of it; one of 50 Gb/s at the slow end"
_SLOW_NETWORK = "assumed: 100 Gb/s for a host of 8 cards, from half to twice of it"
_SMALLEST = "assumed: 520 beside reading at 414 tokens/s of Qwen3-0.6B alone on an H20 (Qwen's speed benchmark, SGLang)"
ASSUMED: Mapping[str, Rate] = {
    "train_flops_share": Rate(
        0.25, 0.45, "assumed: 0.38 to 0.43 are usual for dense models (arXiv 2407.21783, table 4)"
    ),
    "mixture_flops_share": Rate(0.08, 0.22, "assumed: experts multiply few tokens each; half of dense or less"),
    "prefill_flops_share": Rate(0.3, 0.6, "assumed"),
    "decode_bytes_share": Rate(0.4, 0.8, "assumed"),
    "decode_passes_s": Rate(200, 520, _SMALLEST),
    "optimizer_bytes_share": Rate(0.8, 1.0, "assumed"),
    "gather_bytes_s": Rate(100 * _GB, 225 * _GB, _LINKED),
    "small_sums_s": Rate(30e3, 100e3, "assumed: 10 to 33 us for a small all-reduce over NVLink"),
    "network_bytes_s": Rate(6 * _GB, 40 * _GB, _NETWORK),
    "to_host_bytes_s": Rate(6 * _GB, 25 * _GB, "assumed: PCIe 4.0 of 32 GB/s; pageable memory reaches less"),
    "pack_bytes_s": Rate(1.0 * _GB, 1.8 * _GB, "one thread of an AMD EPYC, 2026-11-22"),
    "wire_bytes_s": Rate(1.0 * _GB, 1.3 * _GB, "gRPC over loopback on two cores of an AMD EPYC, 2026-11-22"),
    "stage_bytes_s": Rate(0.4 * _GB, 1.3 * _GB, "copy, changes and SHA-256 on an AMD EPYC, 2026-11-22"),
    "load_bytes_s": Rate(2 * _GB, 8 * _GB, "assumed: unpinned host memory over PCIe"),
}
_OF_UNLINKED = {
    "gather_bytes_s": Rate(6 * _GB, 16 * _GB, _UNLINKED),
    "small_sums_s": Rate(10e3, 30e3, "assumed: 33 to 100 us for a small all-reduce over PCIe"),
    "network_bytes_s": Rate(0.8 * _GB, 3.1 * _GB, _SLOW_NETWORK),
}
_FILE = "--rates"


def find_kind(name: str | None, memory_gb: float | None) -> GpuKind:
    """The card of a name, also of a part of it such as "H100 NVL", or the usual one with so much memory.

    Args:
        name: As nvidia-smi prints it.
        memory_gb: As in the card's name; used if there is no name.

    Raises:
        InputError: There is no such card in GPU_KINDS, or several.
    """
    if name is None:
        return _usual_card(memory_gb)
    words = name.lower().split()
    partly = [card for card in GPU_KINDS.values() if all(word in card.name.lower() for word in words)]
    # "L4" is a part of L40S and a word of L4.
    whole = [card for card in partly if {*words} <= {*card.name.lower().split()}]
    exactly = [card for card in partly if card.name.lower() == name.lower()] or whole or partly
    if len(exactly) == 1:
        return exactly[0]
    near = (
        [card.name for card in partly] or difflib.get_close_matches(name, GPU_KINDS, n=3, cutoff=0.3) or list(GPU_KINDS)
    )
    rule = f"{name!r} is {'a part of several names' if partly else 'no known card'}"
    raise InputError("--card", rule, f"Give one of {', '.join(near)}")


def _usual_card(memory_gb: float | None) -> GpuKind:
    if memory_gb not in _BY_MEMORY:
        rule = f"{memory_gb or 0:g} GB stands for no known card"
        if memory_gb is None:
            rule = "is not given, and nvidia-smi shows no GPU of this machine"
        sizes = ", ".join(f"{size} ({card})" for size, card in _BY_MEMORY.items())
        raise InputError("--gpu-memory", rule, f"Name the card by --card, or give its GB: {sizes}")
    return GPU_KINDS[_BY_MEMORY[int(memory_gb)]]


def rates_of(card: GpuKind, results: Path | None = None) -> dict[str, Rate]:
    """Every rate of a card: measured where a results file has it, else assumed.

    Args:
        results: What `make gpu-test` wrote; None or a missing file measures nothing.

    Raises:
        InputError: The file has another content, or a rate that is unknown here.
    """
    rates = dict(ASSUMED) if card.linked else {**ASSUMED, **_OF_UNLINKED}
    for record in _records(results):
        if record.get("card") != card.name or not record.get("passed"):
            continue
        for name, value in (record.get("rates") or {}).items():
            if name not in ASSUMED:
                raise InputError(
                    _FILE, f"{results}: {name!r} is an unknown rate", f"The rates are {', '.join(ASSUMED)}"
                )
            rates[name] = Rate(value, value, f"measured: part {record['part']}, {record['date']}", measured=True)
    return rates


def _records(results: Path | None) -> list[dict[str, Any]]:
    if results is None or not results.exists():
        return []
    fix = "Give a file that `make gpu-test` wrote"
    try:
        records = read_json_file(results)
    except (OSError, ValueError) as error:
        raise InputError(_FILE, f"{results} cannot be read ({error})", fix) from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise InputError(_FILE, f"{results} holds another content than records", fix)
    return records
