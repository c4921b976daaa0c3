"""`python -m benchmarks.chaos.arithmetic [--seed N]`: the arithmetic example with its real engines, alone and struck.

Both runs are `examples/arithmetic/demo.py` with one seed. In the second a service or Redis is killed (SIGKILL) every so
many steps, in turn; its final policy has to be as good. Writes `learns-seed-N.json`, which the report shows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil

_TURN = ("gspo.generation", "gspo.reward", "gspo.learner", "gspo.coordinator", "redis-server")
_TIMEOUT_S = 2400.0
_DEMO = Path(__file__).parents[2] / "examples/arithmetic/demo.py"


def main() -> None:
    """Run twice, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the example")
    parser.add_argument("--every", type=int, default=20, help="steps from one kill to the next")
    parser.add_argument("--alone", type=Path, help="run directory of the undisturbed run, where there is one already")
    parser.add_argument("--results", type=Path, default=Path(".cache/chaos"), help="folder of the file that is written")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gspo-learns-", ignore_cleanup_errors=True) as folder:
        alone = given.alone or _run(Path(folder) / "alone", given.seed, every=None)[0]
        struck, kills = _run(Path(folder) / "struck", given.seed, every=given.every)
        found = {"seed": given.seed, "alone": _came_to(alone), "struck": _came_to(struck), "kills": kills}
    (given.results / f"learns-seed-{given.seed}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    sys.exit(0 if _is_as_good(found) else 1)


def _run(runs: Path, seed: int, *, every: int | None) -> tuple[Path, list[dict[str, Any]]]:
    """The example from start to end: its run directory, and who was killed when."""
    runs.mkdir()
    command = [sys.executable, str(_DEMO), "--seed", str(seed), "--runs", str(runs)]
    process = subprocess.Popen(command, start_new_session=True)
    kills: list[dict[str, Any]] = []
    deadline = time.monotonic() + _TIMEOUT_S
    turn = cycle(_TURN)
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run in {runs} had not ended after {_TIMEOUT_S:g} s")
            step = len(list(runs.glob("*/log/step-*.parquet")))
            if every and step >= every * (len(kills) + 1) and _kill(process.pid, who := next(turn)):
                kills.append({"who": who.removeprefix("gspo."), "step": step})
                print(f"killed {who} at step {step}", flush=True)
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
    if process.returncode:
        raise RuntimeError(f"the run in {runs} ended with exit code {process.returncode}")
    (run_dir,) = (path.parent for path in runs.glob("*/summary.json"))
    return run_dir, kills


def _kill(root: int, who: str) -> bool:
    """SIGKILL to the first process below that has the word on its command line."""
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if any(word == who or Path(word).name.startswith(who) for word in process.cmdline()):
                process.kill()
                return True
    return False


def _came_to(run_dir: Path) -> dict[str, Any]:
    summary = json.loads((run_dir / "summary.json").read_text())
    kept = ("accuracy_before", "accuracy_after", "accuracy_after_stderr", "accuracy_after_version", "groups")
    wall_s = sum(seconds for seconds in (summary.get("wall_s") or {}).values() if seconds)
    return {key: summary[key] for key in kept} | {"wall_s": wall_s}


def _is_as_good(found: dict[str, Any]) -> bool:
    """Every step trained, every group ended, and an accuracy within three standard errors, or above."""
    alone, struck = found["alone"], found["struck"]
    groups = struck["groups"]
    ended: Sequence[int] = [groups[name] for name in ("trained", "filtered", "stale", "failed", "unused")]
    error = (alone["accuracy_after_stderr"] ** 2 + struck["accuracy_after_stderr"] ** 2) ** 0.5
    return (
        struck["accuracy_after_version"] == alone["accuracy_after_version"]
        and sum(ended) == groups["issued"]
        and struck["accuracy_after"] > alone["accuracy_after"] - 3 * error
    )


if __name__ == "__main__":
    main()
