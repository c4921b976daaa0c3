"""`python -m benchmarks.chaos [--seed N] [--rounds N]`: rounds of strikes, docs/chaos.md, and exit code 1 if one broke.

A round strikes once with each kind. `--only N` plays one round again and writes its file alone; `--report` makes the
report of the files that are there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.chaos.report import write_report
from benchmarks.chaos.rounds import RoundPlan, run_round
from benchmarks.chaos.schedule import kinds, round_of

ROUNDS, SEED, LASTS_S = 7, 0, 420.0


def main() -> None:
    """Play, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED, help="of the schedule; the same seed strikes the same")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="strikes with each kind")
    parser.add_argument("--only", type=int, help="play this round alone")
    parser.add_argument("--kinds", nargs="*", help="strike with these alone")
    parser.add_argument("--lasts-s", type=float, default=LASTS_S, help="seconds of training in a round")
    parser.add_argument("--results", type=Path, default=Path(".cache/chaos"), help="folder of the rounds' files")
    parser.add_argument("--report", action="store_true", help="play nothing, write the report")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of chaos.md, chaos.json and chaos.png")
    given = parser.parse_args()
    # As Ctrl-C, so that namespaces, disk and processes go.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_root = os.geteuid() == 0
    among = given.kinds or kinds(cuts=is_root, disks=is_root)
    given.results.mkdir(parents=True, exist_ok=True)
    numbers = [] if given.report else [given.only] if given.only is not None else range(given.rounds)
    broken = [
        text for number in numbers for text in _play(number, given.seed, among, given.results, is_root, given.lasts_s)
    ]
    for text in broken:
        print(f"BROKEN: {text}", file=sys.stderr)
    if given.only is None:
        write_report(given.results, given.seed, given.out)
    sys.exit(1 if broken else 0)


def _play(number: int, seed: int, among: list[str], results: Path, is_root: bool, lasts_s: float) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="gspo-chaos-", ignore_cleanup_errors=True) as folder:
        print(f"round {number} of seed {seed}", flush=True)
        planned = round_of(seed, number, among)
        keep = results / f"broken-seed-{seed}-round-{number}"
        plan = RoundPlan(
            Path(folder), seed, number, planned, is_root, lasts_s, keep, lambda line: print(line, flush=True)
        )
        played = asyncio.run(run_round(plan))
    (results / f"seed-{seed}-round-{number}.json").write_text(played.to_json())
    return played.broken


if __name__ == "__main__":
    main()
