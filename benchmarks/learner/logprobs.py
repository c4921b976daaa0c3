"""The section `logprobs`: token_logprobs against the plain way at a real vocabulary, in time and memory, side by side.

Random numbers stand for the states and weights of one long answer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from benchmarks.harness.child_process import run_child
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import table

if TYPE_CHECKING:
    from torch import Tensor

# Qwen3-0.6B's vocabulary and width, and one long answer.
SIZE = {"vocabulary": 151_936, "tokens": 4096, "width": 1024}
_SMALL = {"vocabulary": 8192, "tokens": 512, "width": 256}
_ROUNDS, _TIMEOUT_S, _WARM_UP_TOKENS = 2, 900.0, 64
_LABELS = {"plain": "plain", "chunked": "in chunks"}
_TEXT = """
From last hidden states to the gradients of states and output weight, in float32; medians. *Plain*: all logits at \
once, `log_softmax`, `gather`, without entropy. *In chunks*: `gspo_core.logprobs.token_logprobs` at its default chunk \
size, with entropy. Peak memory is above the inputs and includes the gradients.

{ways}
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Both ways one after the other, two rounds; quick: at a small size."""
    size = _SMALL if effort.quick else SIZE
    yield Measurement(f"{size['vocabulary']:,} words, {size['tokens']:,} tokens", _measure, (size,))


def _measure(size: dict[str, int]) -> Record:
    rounds = run_child(f"{__name__}.compare", size, timeout_s=_TIMEOUT_S)
    frames = {name: pd.DataFrame(of_way) for name, of_way in rounds.items()}
    ways = {
        name: {"seconds": frame.seconds.median(), "peak_bytes": int(frame.peak_bytes.max()), "rounds": rounds[name]}
        for name, frame in frames.items()
    }
    return {**size, "ways": ways}


def plain(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    """All logits at once; no entropy."""
    return (hidden_ND @ weight_VD.T).log_softmax(-1).gather(1, target_N[:, None])[:, 0]


def chunked(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    """Ours at its default chunk size, which computes the entropy too."""
    from gspo_core.logprobs import token_logprobs

    return token_logprobs(hidden_ND, weight_VD, target_N)[0]


def compare(vocabulary: int, tokens: int, width: int) -> dict[str, list[dict[str, float]]]:
    """Seconds and peak memory above the inputs of every round of each way. A child process."""
    import torch

    torch.manual_seed(0)
    hidden_ND = torch.randn(tokens, width, requires_grad=True)
    weight_VD = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    target_N = torch.randint(vocabulary, (tokens,))
    ways = {"plain": plain, "chunked": chunked}
    for way in ways.values():
        _once(way, hidden_ND[:_WARM_UP_TOKENS].detach().requires_grad_(), weight_VD, target_N[:_WARM_UP_TOKENS])
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, way in ways.items():
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
    way(hidden_ND, weight_VD, target_N).mean().backward()  # type: ignore[no-untyped-call]
    return {
        "seconds": time.monotonic() - began,
        "processor_s": time.process_time() - used,  # of all threads, without other programs of the machine
        "peak_bytes": _memory_bytes("VmHWM") - before,
    }


def _memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def text(results: Results) -> str:
    """Time and peak memory of both ways, and those of ours as a share of the plain one's."""
    ways = [
        {**case, **case["ways"][name], "label": label, "plain": case["ways"]["plain"]}
        for case in results["logprobs"]
        for name, label in _LABELS.items()
    ]
    frame = pd.json_normalize(ways, max_level=1)
    labels = [f"{r.label}: V {r.vocabulary:,}, {r.tokens:,} tokens, D {r.width:,}" for r in frame.itertuples()]
    return _TEXT.format(
        ways=table(
            ("", labels, ""),
            ("s", frame.seconds, ".1f"),
            ("of plain", frame.seconds / frame["plain.seconds"], ".2f"),
            ("peak, GiB", frame.peak_bytes / 2**30, ".2f"),
            ("of plain", frame.peak_bytes / frame["plain.peak_bytes"], ".2f"),
        )
    )


LOGPROBS = PageSection("logprobs", "Log-probs at a real vocabulary", measurements, text)
