"""The section `push`: the size of a version's changes, the ways to move them, and real pushes to a real engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from benchmarks import CACHE
from benchmarks.harness.child_process import run_child
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import table
from benchmarks.harness.workload import num_parameters, write_config

RATES = (1e-6, 3e-6, 1e-5)
VERSIONS = 3
_TRAIN_S, _TIMEOUT_S, _SERVICE_S = 1200.0, 300.0, 900.0
_MIB, _GIB = 2**20, 2**30
_TEXT = """
A random Qwen3 with {parameters:,} parameters ({mib:.0f} MiB in bfloat16) learns the words of Python's library for 24 \
steps. Each learning rate continues from there with a fresh AdamW in float32. A version is 4 optimizer steps of policy \
gradients with random advantages, clipped at norm 1. Rows are medians over {versions} versions.

The changes are the gaps between changed elements with the differences of their bits, under zstd, packed in one thread \
a core. The digest, SHA-256 of each tensor, runs at {digest:.2f} GiB/s; learner and generator each compute it once a \
version.

{packing}

The next table is the transfer of the whole policy between two processes of this machine. The receiver drops the data.

{transfers}

The last table is the learner's publisher with an idle generation service and vLLM. *Transfer alone*: gRPC with ready \
frames. *Staged and checked*: packing, transfer, unpacking and the generator's digest; all but the last overlap. \
*Stall*: the pause of generation (pause, load into vLLM, resume). *Push*: from publication until the version is \
served, with the stall.

{pushes}
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """The changes at each learning rate, the ways between two processes, and real pushes; quick: one rate."""
    rates, versions = (RATES[:1], 1) if effort.quick else (RATES, VERSIONS)
    for rate in rates:
        yield Measurement(f"packing, learning rate {rate:g}", _measure_packing, (rate, rates, versions))
    yield Measurement("between two processes", _measure_transfer, (rates, versions))
    yield Measurement("to the generation service", _measure_pushes, (rates, versions))


def _folder(rates: Sequence[float], versions: int) -> Path:
    """The model and its versions at these learning rates; they are made at the first call."""
    name = f"push-{len(rates)}-{versions}"
    folder, unfinished = CACHE / name, CACHE / f"{name}.tmp"
    if not folder.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        arguments = {"folder": str(unfinished), "rates": rates, "versions": versions}
        run_child("benchmarks.push.versions.train_versions", arguments, timeout_s=_TRAIN_S)
        unfinished.rename(folder)
    return folder


def _measure_packing(rate: float, rates: Sequence[float], versions: int) -> Record:
    folder = _folder(rates, versions)
    arguments = {"folder": str(folder), "rate": rate, "versions": versions}
    packed = run_child("benchmarks.push.transfer.pack", arguments, timeout_s=_TIMEOUT_S)
    return {"kind": "packing", "rate": rate, "parameters": num_parameters(folder / "model"), "versions": packed}


def _measure_transfer(rates: Sequence[float], version: int) -> Record:
    arguments = {"folder": str(_folder(rates, version)), "rates": rates, "version": version}
    return {"kind": "wire", **run_child("benchmarks.push.transfer.send", arguments, timeout_s=_TIMEOUT_S)}


def _measure_pushes(rates: Sequence[float], versions: int) -> Record:
    folder = _folder(rates, versions)
    config = write_config("push", "fixed", "bfloat16", model={"path": str(folder / "model")})
    arguments = {"config": str(config), "folder": str(folder), "rates": rates, "versions": versions}
    pushes = run_child("benchmarks.push.publication.push_all", arguments, timeout_s=_SERVICE_S)
    return {"kind": "service", "pushes": pushes}


def text(results: Results) -> str:
    """The changes of a version, the whole policy on each way, and real pushes of everything and of changes."""
    packings, (wire,), (service,) = (_of(results, kind) for kind in ("packing", "wire", "service"))
    versions = pd.json_normalize(packings, "versions", ["rate"])
    versions["share"] = versions["gaps.bytes"] / versions.bytes
    changes = versions.groupby("rate").median()
    ways = pd.Series({"plain TCP": wire["tcp_s"], "gRPC, our frames": wire["grpc_s"]})
    pushes = pd.DataFrame(service["pushes"])
    # The first push of each learning rate has every element.
    groups = pushes.groupby(pushes.rate.where(pushes.version > 0, 0.0)).median()
    sent_s = [wire["grpc_s"] if rate == 0.0 else wire["changes_s"][f"{rate:g}"] for rate in groups.index]
    return _TEXT.format(
        parameters=packings[0]["parameters"],
        mib=versions.bytes[0] / _MIB,
        versions=len(packings[0]["versions"]),
        digest=(versions.bytes / versions.digest_s).median() / _GIB,
        packing=table(
            ("learning rate", changes.index, "g"),
            ("elements changed", changes.changed, ".1%"),
            ("of all bytes", changes.share, ".1%"),
            ("pack, ms", changes["gaps.pack_s"] * 1e3, ".0f"),
            ("apply, ms", changes["gaps.apply_s"] * 1e3, ".0f"),
        ),
        transfers=table(
            ("", ways.index, ""),
            ("ms", ways * 1e3, ".0f"),
            ("GiB/s", wire["bytes"] / ways / _GIB, ".2f"),
            ("of TCP", wire["tcp_s"] / ways, ".0%"),
        ),
        pushes=table(
            ("", ["every element" if rate == 0.0 else f"changes at {rate:g}" for rate in groups.index], ""),
            ("MiB", groups.bytes / _MIB, ".1f"),
            ("of all bytes", groups.share, ".1%"),
            ("transfer alone, s", sent_s, ".3f"),
            ("staged and checked, s", groups.stage_s, ".3f"),
            ("stall, s", groups.stall_s, ".3f"),
            ("push, s", groups.push_s, ".3f"),
        ),
    )


def _of(results: Results, kind: str) -> list[Record]:
    return [case for case in results["push"] if case["kind"] == kind]


PUSH = PageSection("push", "The weight push", measurements, text)
