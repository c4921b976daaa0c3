"""Sums that add up over the micro-batches and ranks of one optimizer step, and the floats made from them.

Not a metrics client: it knows no names of its own; figures.py and loss.py choose them.

Stats map keys to detached 0-dim float64 tensors. A quantity x is `x.count` and `x.sum`, and where its spread
matters `x.square` and `x.max` too. Over ranks: all-reduce `.max` keys by maximum and every other key by sum.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

SUM_DTYPE = torch.float64  # log-ratios near 1e-4 lose their spread in float32 squares
Stats = dict[str, Tensor]


def mean_stats(name: str, x: Tensor, mask: Tensor) -> Stats:
    """Count and sum of x where mask is set: enough for a share (x of 0 and 1) or a mean. Any shape."""
    kept = torch.where(mask.bool(), x.detach(), 0).to(SUM_DTYPE)
    return {f"{name}.count": mask.bool().sum().to(SUM_DTYPE), f"{name}.sum": kept.sum()}


def moment_stats(name: str, x: Tensor, mask: Tensor) -> Stats:
    """As `mean_stats`, with the sum of squares and the largest |x|, for mean, std and max. Any shape."""
    kept = torch.where(mask.bool(), x.detach(), 0).to(SUM_DTYPE)
    largest = kept.abs().max() if kept.numel() else kept.sum()
    return mean_stats(name, x, mask) | {f"{name}.square": kept.square().sum(), f"{name}.max": largest}


def merge(parts: Iterable[Stats]) -> Stats:
    """Add up the stats of several micro-batches; `.max` keys keep the largest. A part may lack keys.

    Parts may be on several devices: a sum is on that of the first part that has it.
    """
    merged: Stats = {}
    for part in parts:
        for key, value in part.items():
            if key not in merged:
                merged[key] = value
                continue
            add = torch.maximum if key.endswith(".max") else torch.add
            merged[key] = add(merged[key], value.to(merged[key].device))
    return merged


def figures(stats: Stats) -> dict[str, float]:
    """Floats to report: `x` where only a sum is kept, else `x_mean`, `x_std` (Bessel) and `x_max` (of |x|).

    A quantity that was never seen (count 0) gives 0; read its count where that difference matters.
    """
    reported: dict[str, float] = {}
    for key, count_tensor in stats.items():
        name, _, part = key.rpartition(".")
        if part != "count":
            continue
        count, total = float(count_tensor), float(stats[f"{name}.sum"])
        mean = total / count if count else 0.0
        if f"{name}.square" not in stats:
            reported[name] = mean
            continue
        square = float(stats[f"{name}.square"])
        variance = (square - total * mean) / (count - 1) if count > 1 else 0.0
        reported[f"{name}_mean"] = mean
        reported[f"{name}_std"] = max(variance, 0.0) ** 0.5
        reported[f"{name}_max"] = float(stats[f"{name}.max"])
    return reported
