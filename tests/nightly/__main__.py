"""`make nightly`: run the areas one after another, and keep what they came to in docs/nightly.json and docs/nightly.md.

An area that has passed at this commit is not run again, so the same command continues an interrupted night.
Exit codes: 0 no area is red, 1 one is, 130 it was interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.nightly.areas import NOT_RUN, ROOT, Area, all_areas
from tests.nightly.records import AreaRecord, keep, read_records, shortened, why_red, write_page
from tests.support.repository.process_session import run_session

_LOGS = ROOT / ".cache/nightly"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def main() -> int:
    """Run what the command line asks for; the exit code."""
    areas = all_areas()
    options = _arguments(areas)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    if not options.check:
        try:
            _run(areas, options)
        except KeyboardInterrupt:
            print("interrupted: the same command goes on with the areas that have not passed", file=sys.stderr)
            return 130
        write_page(areas, today)
    records = read_records()
    red = {area.name: reason for area in areas if (reason := why_red(area.name, records, today))}
    for name, reason in red.items():
        print(f"red: {name}: {reason}", file=sys.stderr)
    return 1 if red else 0


def _arguments(areas: Sequence[Area]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__)
    names = [area.name for area in areas]
    parser.add_argument("--only", action="append", metavar="AREA", help="this area alone; may be options again")
    parser.add_argument("--again", action="store_true", help="run also what has passed at this commit")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no area after so long")
    parser.add_argument("--list", action="store_true", help="print the areas with their commands, and run nothing")
    parser.add_argument("--check", action="store_true", help="run nothing: name the red areas")
    options = parser.parse_args()
    if unknown := [name for name in options.only or [] if name not in names]:
        parser.error(f"--only {unknown[0]}: the areas are {', '.join(names)}")
    if options.list:
        for area in areas:
            print(f"{area.name:28} at most {area.limit_min:3.0f} min  {' '.join(area.command)}")
        sys.exit(0)
    return options


def _run(areas: Sequence[Area], options: argparse.Namespace) -> None:
    commit, deadline = _commit(), time.monotonic() + 60 * options.minutes
    chosen = [area for area in areas if not options.only or area.name in options.only]
    for number, area in enumerate(chosen, 1):
        passed = read_records().get(area.name, {}).get("passed")
        if passed is not None and passed.commit == commit and not commit.endswith("+") and not options.again:
            print(f"{number} of {len(chosen)}  {area.name}: passed at this commit", flush=True)
            continue
        if time.monotonic() > deadline:
            print(f"{area.name}: not begun: --minutes are over", flush=True)
            return
        print(f"{number} of {len(chosen)}  {area.name}: at most {area.limit_min:.0f} min", flush=True)
        record = _run_area(area, commit)
        keep(record)
        print(f"    {record.result} after {record.minutes:.1f} min {record.reason}", flush=True)


def _run_area(area: Area, commit: str) -> AreaRecord:
    log = _LOGS / f"{area.name.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if area.tool and not shutil.which(area.tool):
        log.write_text(f"{area.tool} is missing\n")
        code: int | None = NOT_RUN
    else:
        code = run_session(area.command, log, 60 * area.limit_min, cwd=ROOT)
    result = {0: "pass", NOT_RUN: "not run"}.get(-1 if code is None else code, "fail")
    text = log.read_text(errors="replace")
    reason = ""
    if result == "fail":
        ended = f"ended after {area.limit_min:.0f} min" if code is None else f"exit code {code}"
        reason = ", ".join(dict.fromkeys(_FAILED.findall(text))) or f"{ended}: {_last_line(text)}"
    elif result == "not run":
        reason = _last_line(text)
    return AreaRecord(
        area=area.name,
        result=result,
        reason=shortened(reason),
        minutes=round((time.monotonic() - began) / 60, 1),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        commit=commit,
        machine=_machine(),
    )


def _last_line(text: str) -> str:
    # make reports the exit code of its command in a line of its own.
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("make: ***")]
    return lines[-1].strip() if lines else "it ended without a word"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.rstrip()

    own = ("docs/nightly.json", "docs/nightly.md")
    changed = [line for line in git("status", "--porcelain").splitlines() if line[3:] not in own]
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


def _machine() -> str:
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = model[1] if model else platform.machine()
    return f"{name}, {os.cpu_count()} cores, {psutil.virtual_memory().total >> 30} GiB"


if __name__ == "__main__":
    sys.exit(main())
