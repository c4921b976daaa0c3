"""A child process: log-probs of one long answer from hidden states, forward and backward, plainly and in chunks.

Random numbers stand for states and weights.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.child_process import serve
from gspo_core.logprobs import token_logprobs

_WARM_UP_TOKENS = 64


def plain(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    """All logits at once, as a model without further ado gives them; no entropy."""
    logp_NV = torch.log_softmax(hidden_ND @ weight_VD.T, -1)
    return logp_NV.gather(1, target_N[:, None])[:, 0]


def chunked(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    """Ours at its default chunk size; the entropy is made too."""
    return token_logprobs(hidden_ND, weight_VD, target_N)[0]


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"plain": plain, "chunked": chunked}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds and peak memory above the inputs of every round of each way, in turn."""
    torch.manual_seed(0)
    hidden_ND = torch.randn(spec["tokens"], spec["width"], requires_grad=True)
    weight_VD = (torch.randn(spec["vocabulary"], spec["width"]) / spec["width"] ** 0.5).requires_grad_()
    target_N = torch.randint(spec["vocabulary"], (spec["tokens"],))
    for way in WAYS.values():
        _once(way, hidden_ND[:_WARM_UP_TOKENS].detach().requires_grad_(), weight_VD, target_N[:_WARM_UP_TOKENS])
    rounds: dict[str, Any] = {name: [] for name in WAYS}
    for _ in range(spec["rounds"]):
        for name, way in WAYS.items():
            rounds[name].append(_once(way, hidden_ND, weight_VD, target_N))
    return rounds


def _once(
    way: Callable[[Tensor, Tensor, Tensor], Tensor], hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor
) -> dict[str, float]:
    """One forward and backward. The gradients are new memory and count."""
    hidden_ND.grad = weight_VD.grad = None
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _memory_bytes("VmRSS")
    began, used = time.monotonic(), time.process_time()
    way(hidden_ND, weight_VD, target_N).mean().backward()
    return {
        "seconds": time.monotonic() - began,
        "processor_s": time.process_time() - used,  # of all threads: what others do on the machine is not in it
        "peak_bytes": _memory_bytes("VmHWM") - before,
    }


def _memory_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


if __name__ == "__main__":
    serve(measure)
