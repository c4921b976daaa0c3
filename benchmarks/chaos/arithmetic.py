"""`python -m benchmarks chaos-engines`: the arithmetic example with its real engines, alone and with kills.

Both runs are `examples/arithmetic/demo.py` with one seed. In the second a service or Redis is killed (SIGKILL) every so
many steps; its final policy has to be as good. It writes `learns-seed-N.json`, which the report shows.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from benchmarks import ROOT
from benchmarks.chaos.command import RESULTS
from benchmarks.harness.child_process import MeasurementError, process_tree, started, tail

_VICTIMS = ("gspo.generation", "gspo.reward", "gspo.learner", "gspo.coordinator", "redis-server")
_TIMEOUT_S, _DRAIN_S = 2400.0, 60.0
_DEMO = ROOT / "examples/arithmetic/demo.py"


def chaos_engines(
    seed: Annotated[int, typer.Option(help="Of the example")] = 0,
    every: Annotated[int, typer.Option(help="Steps from one kill to the next")] = 20,
    alone: Annotated[Path | None, typer.Option(help="Run directory of an undisturbed run, if there is one")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the file that is written")] = RESULTS,
) -> None:
    """Train the arithmetic example with and without kills, and compare the policies for docs/chaos.md."""
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gspo-learns-", ignore_cleanup_errors=True) as folder:
        began_unix_s = time.time()
        alone = alone or _run(Path(folder) / "alone", seed, every=None)[0]
        struck, kills = _run(Path(folder) / "struck", seed, every=every)
        pair = {
            "began_unix_s": began_unix_s,
            "seed": seed,
            "alone": _outcome(alone),
            "struck": _outcome(struck),
            "kills": kills,
        }
    (results / f"learns-seed-{seed}.json").write_text(json.dumps(pair, indent=1) + "\n")
    print(json.dumps(pair, indent=1))
    raise typer.Exit(0 if _is_as_good(pair) else 1)


def _run(runs: Path, seed: int, *, every: int | None) -> tuple[Path, list[dict[str, Any]]]:
    """The example from start to end: its run directory, and the killed processes with their steps."""
    runs.mkdir()
    log = runs / "output.txt"
    kills: list[dict[str, Any]] = []
    victims, deadline = cycle(_VICTIMS), time.monotonic() + _TIMEOUT_S
    command = [sys.executable, str(_DEMO), "--seed", str(seed), "--runs", str(runs)]
    with started(command, log, patience_s=_DRAIN_S) as process:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise MeasurementError(f"the run in {runs} had not ended after {_TIMEOUT_S:g} s. {tail(log)}")
            step = len(list(runs.glob("*/log/step-*.parquet")))
            if every and step >= every * (len(kills) + 1) and _kill(process.pid, who := next(victims)):
                kills.append({"who": who.removeprefix("gspo."), "step": step})
                print(f"killed {who} at step {step}", flush=True)
            time.sleep(0.1)
    if process.returncode:
        raise MeasurementError(f"the run in {runs} ended with exit code {process.returncode}. {tail(log)}")
    (run_dir,) = (path.parent for path in runs.glob("*/summary.json"))
    return run_dir, kills


def _kill(root: int, who: str) -> bool:
    """SIGKILL to the first process below that has the word on its command line."""
    for process in process_tree(root)[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if any(word == who or Path(word).name.startswith(who) for word in process.cmdline()):
                process.kill()
                return True
    return False


def _outcome(run_dir: Path) -> dict[str, Any]:
    summary = json.loads((run_dir / "summary.json").read_text())
    kept = ("accuracy_before", "accuracy_after", "accuracy_after_stderr", "accuracy_after_version", "groups")
    wall_s = sum(seconds for seconds in (summary.get("wall_s") or {}).values() if seconds)
    return {key: summary[key] for key in kept} | {"wall_s": wall_s}


def _is_as_good(pair: dict[str, Any]) -> bool:
    """Every step trained, every group ended, and an accuracy within three standard errors, or above."""
    alone, struck = pair["alone"], pair["struck"]
    groups = struck["groups"]
    ended: Sequence[int] = [groups[name] for name in ("trained", "filtered", "stale", "failed", "unused")]
    error = (alone["accuracy_after_stderr"] ** 2 + struck["accuracy_after_stderr"] ** 2) ** 0.5
    is_whole = struck["accuracy_after_version"] == alone["accuracy_after_version"] and sum(ended) == groups["issued"]
    return is_whole and bool(struck["accuracy_after"] > alone["accuracy_after"] - 3 * error)
