"""Part W, the weight push: what a version's changes weigh, what moves them, and real pushes to a real engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness.child_process import run_child
from benchmarks.harness.measurement import Measurement
from benchmarks.harness.workload import num_parameters
from benchmarks.push.publication import measure as measure_service
from benchmarks.push.versions import RATES, VERSIONS, model

_TIMEOUT_S = 300.0


def cases(*, quick: bool) -> Iterator[Measurement]:
    """The encoding at each learning rate, the ways between two processes, and real pushes; quick: one rate."""
    rates, versions = (RATES[:1], 1) if quick else (RATES, VERSIONS)
    parameters = num_parameters(model())
    for rate in rates:
        yield Measurement(f"packing, learning rate {rate:g}", _packing, (rate, versions, parameters))
    yield Measurement("between two processes", _wire, (rates, versions))
    yield Measurement("to the generation service", _service, (rates, versions))


def _packing(rate: float, versions: int, parameters: int) -> dict[str, Any]:
    found = run_child("push.encodings", {"rate": rate, "versions": versions}, timeout_s=_TIMEOUT_S)
    return {"kind": "packing", "rate": rate, "parameters": parameters, **found}


def _wire(rates: Sequence[float], versions: int) -> dict[str, Any]:
    return {"kind": "wire", **run_child("push.transfer", {"rates": rates, "versions": versions}, timeout_s=_TIMEOUT_S)}


def _service(rates: Sequence[float], versions: int) -> dict[str, Any]:
    return {"kind": "service", **measure_service(rates, versions)}
