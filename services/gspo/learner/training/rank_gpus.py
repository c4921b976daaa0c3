"""The GPUs of the learner's ranks and their peak flop/s, the denominator of MFU.

A GPU has the peak of its data sheet, for bfloat16 with any `learner.dtype`. A CPU has the speed of a matrix product in
the learner's dtype, measured once at the start; the other services on its cores slow down both.
"""

import json
import time
from functools import cache

import torch
from torch import distributed

from gspo.common.host.machine import visible_gpus
from gspo.common.telemetry.gpu_use import peak_flops
from gspo.learner.ranks.process_group import gather_bytes

# Two matrices of this width fit a core's cache in every dtype.
_WIDTH, _MEASURED_S = 512, 0.3


def gather_gpus(device: torch.device, dtype: torch.dtype, num_threads: int, local_rank: int) -> dict[str, float | None]:
    """The GPU of every rank -> its peak in flop/s, or None if unknown. All ranks call it at once."""
    own: tuple[str, float | None]
    if device.type == "cpu":
        distributed.barrier()  # ranks of one machine share its cores, so they measure at the same time
        own = f"CPU of rank {distributed.get_rank()}", measured_flops_per_s(dtype, num_threads)
    else:
        own = _gpu(device, local_rank)
    gathered = gather_bytes(json.dumps(own).encode(), device)
    return dict(map(json.loads, gathered))


@cache
def measured_flops_per_s(dtype: torch.dtype, num_threads: int) -> float:
    """The best flop/s of a product of two square matrices."""
    torch.set_num_threads(num_threads)
    a = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    out, best_s = torch.empty_like(a), float("inf")
    ends_s = time.perf_counter() + _MEASURED_S
    while (began_s := time.perf_counter()) < ends_s:
        torch.mm(a, a, out=out)
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * _WIDTH**3 / best_s


def _gpu(device: torch.device, local_rank: int) -> tuple[str, float | None]:
    gpus = visible_gpus()
    # nvidia-smi and the generators' heartbeats know a GPU by its UUID; without nvidia-smi it still counts as one.
    name = f"GPU of rank {distributed.get_rank()}"
    if local_rank < len(gpus):
        name = gpus[local_rank].uuid or gpus[local_rank].name
    return name, peak_flops(torch.cuda.get_device_name(device))
