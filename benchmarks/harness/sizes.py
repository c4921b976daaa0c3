"""The sizes of the measurements: rollouts, lengths and dtypes, and the folders of results. Only numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

Lengths = Literal["fixed", "long-tailed"]
Dtype = Literal["float32", "bfloat16"]
LENGTHS: tuple[Lengths, ...] = get_args(Lengths)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

GROUPS, GROUP_SIZE = 32, 8
NUM_ROLLOUTS = GROUPS * GROUP_SIZE
NUM_MINI_BATCHES = 4
PROMPT_LENGTH = 32
# A fixed answer is as long as it may be. A long-tailed one ends where its model samples the end, on average after
# about as many tokens.
MAX_TOKENS: dict[Lengths, int] = {"fixed": 128, "long-tailed": 512}
KV_CACHE_GIB = 1.0
LAGS = (0, 1, 2)

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache/benchmarks"
RESULTS = ROOT / "benchmarks/results"
DOCS = ROOT / "docs"
