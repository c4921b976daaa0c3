"""Part L, log-probs: token_logprobs against the plain way at a real vocabulary, in time and memory, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.harness.child_process import run_child
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.tables import middle
from benchmarks.learner.logprobs_child import WAYS

# Qwen3-0.6B's vocabulary and width, and one long answer.
SIZE = {"vocabulary": 151_936, "tokens": 4096, "width": 1024}
_SMALL = {"vocabulary": 8192, "tokens": 512, "width": 256}
_TIMEOUT_S = 900.0


def cases(*, quick: bool) -> Iterator[Measurement]:
    """Both ways in turn, two rounds; quick: at a small size."""
    size = _SMALL if quick else SIZE
    yield Measurement(f"{size['vocabulary']:,} words, {size['tokens']:,} tokens", _measure, (size, 2))


def _measure(size: dict[str, int], rounds: int) -> dict[str, Any]:
    found = run_child("learner.logprobs_child", {**size, "rounds": rounds}, timeout_s=_TIMEOUT_S)
    ways = {
        name: {
            "seconds": middle([round_["seconds"] for round_ in found[name]]),
            "peak_bytes": max(round_["peak_bytes"] for round_ in found[name]),
            "rounds": found[name],
        }
        for name in WAYS
    }
    return {**size, "ways": ways}
