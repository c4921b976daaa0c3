"""Part P, the peer: TRL on the same cores, where it is installed; asked for by --peer."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from benchmarks.harness.child_process import run_child
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.sizes import MAX_TOKENS
from benchmarks.harness.tables import middle
from benchmarks.harness.workload import model_folder, prompts

_TIMEOUT_S = 1800.0
_NUM_PROMPTS = 1024


def is_installed() -> bool:
    """Whether TRL can be imported here."""
    return find_spec("trl") is not None


def cases(*, quick: bool) -> Iterator[Measurement]:
    """Answers of the fixed length in float32, as the peer's earlier figure has them."""
    yield Measurement("TRL, fixed, float32", _measure, (2 if quick else 5,))


def _measure(rounds: int) -> dict[str, Any]:
    spec = {
        "model": str(model_folder("long-tailed")),
        "prompts": prompts(_NUM_PROMPTS),
        "max_tokens": MAX_TOKENS["fixed"],
        "rounds": rounds,
    }
    found = run_child("system.trl_trainer", spec, timeout_s=_TIMEOUT_S)
    seconds = middle([round_["seconds"] for round_ in found["rounds"][1:]])
    tokens = found["rounds"][0]["tokens"]
    return {"trl": version("trl"), "seconds": seconds, "tokens_per_s": tokens / seconds, "rounds": found["rounds"]}
