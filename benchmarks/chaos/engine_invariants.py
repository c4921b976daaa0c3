"""Check a finished run of the real engines: what invariants.py computes anew by simulation, the engines make here.

`gspo replay` trains every step again, in float32 to the same bits. Log-probs are compared by the learner, as it trains.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.chaos.invariants import (
    CLOSED_LEDGER,
    COMPLETE,
    NO_NUMBER,
    SETTLED_ONCE,
    YOUNG_ENOUGH,
    FinishedRun,
    Invariant,
    loaded_versions,
)

_REPLAY_S = 1800.0
# Both engines compute in float32: equal weights differ by far less, and other weights by far more.
_SIGMA = 1e-3


def _small_mismatch(run: FinishedRun) -> Iterator[str]:
    compared = 0
    for line in run.lines("metrics.jsonl"):
        sigma = line["figures"].get("sigma_token")
        compared += sigma is not None
        if sigma is not None and not sigma < _SIGMA:
            yield f"step {line['step']}: log-probs of generator and learner differ by {sigma:g}"
    if not compared:
        yield "no step compared log-probs"


def _served_digests(run: FinishedRun) -> Iterator[str]:
    recorded = {line["version"]: line["digest"] for line in run.lines("policy.jsonl")}
    loaded = 0
    for path, event in loaded_versions(run):
        loaded += 1
        if not recorded.get(event["version"], "").startswith(event["digest"]):
            yield f"{path.name} served version {event['version']} with digest {event['digest']}"
    if not loaded:
        yield "no generator loaded anything"


def _replayed(run: FinishedRun) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gspo-replayed-") as folder:
        command = [sys.executable, "-m", "gspo.cli", "replay", str(run.run_dir), "--steps", "1..", "--out", folder]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=_REPLAY_S, check=False)
    if done.returncode:
        yield f"`gspo replay` ended with exit code {done.returncode}: {(done.stderr or done.stdout)[-1000:]}"
        return
    json.loads(done.stdout)


ENGINES = (
    SETTLED_ONCE,
    YOUNG_ENOUGH,
    Invariant(
        "at equal weights, log-probs of generator and learner are equal but for rounding",
        ("compared tokens",),
        _small_mismatch,
    ),
    Invariant("the digest that a generator serves is the recorded one", ("versions",), _served_digests),
    NO_NUMBER,
    COMPLETE,
    Invariant("`gspo replay` of every step gives the recorded digests and figures", ("versions",), _replayed),
    CLOSED_LEDGER,
)
