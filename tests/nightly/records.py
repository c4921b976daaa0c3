"""The result of each area, and its last pass: docs/nightly.json, and the table of docs/nightly.md.

It runs nothing but git.
"""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tests.nightly.areas import ROOT, Area
from tests.support.documents.page_rows import replace_rows

RECORDS, PAGE = ROOT / "docs/nightly.json", ROOT / "docs/nightly.md"
GPU_RECORDS = ROOT / "docs/gpu.json"
# An area without a pass in so long, or in so many commits, is red.
MOST_DAYS, MOST_COMMITS = 7, 100
_BEGIN = "<!-- rows: make nightly -->"
_LONGEST_REASON = 300


@dataclass(frozen=True)
class AreaRecord:
    """One run of an area.

    Attributes:
        result: pass, fail, or not run.
        reason: The failed tests, or the missing tool.
        commit: That of the tree; with `+` if files had changes.
        machine: Processor, cores and memory.
    """

    area: str
    result: str
    reason: str
    minutes: float
    date: str
    commit: str
    machine: str


def read_records() -> dict[str, dict[str, AreaRecord]]:
    """Area -> `last` and, if it ever passed, `passed`."""
    stored = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    return {area: {kind: AreaRecord(**it) for kind, it in kinds.items()} for area, kinds in stored.items()}


def keep(record: AreaRecord) -> None:
    """Put a record into the file."""
    records = read_records()
    kinds = records.setdefault(record.area, {})
    kinds["last"] = record
    if record.result == "pass":
        kinds["passed"] = record
    plain = {area: {kind: asdict(it) for kind, it in of_area.items()} for area, of_area in sorted(records.items())}
    RECORDS.write_text(json.dumps(plain, indent=1) + "\n")


def why_red(area: str, records: Mapping[str, Mapping[str, AreaRecord]], today: datetime.date) -> str:
    """The reason why a release waits for this area; empty if it does not."""
    passed = records.get(area, {}).get("passed")
    if passed is None:
        return "it has never passed"
    days = (today - datetime.date.fromisoformat(passed.date)).days
    if days > MOST_DAYS:
        return f"it passed {days} days ago, and at most {MOST_DAYS} may lie between"
    commits = _commits_since(passed.commit.rstrip("+"))
    if commits is None:
        return f"its last pass is of {passed.commit}, which is no commit here"
    return f"{commits} commits ago, and at most {MOST_COMMITS} may lie between" if commits > MOST_COMMITS else ""


def _commits_since(commit: str) -> int | None:
    words = ["git", "rev-list", "--count", f"{commit}..HEAD"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None


def write_page(areas: Sequence[Area], today: datetime.date) -> None:
    """Make the rows of the page anew; the rest of it stays."""
    replace_rows(PAGE, _BEGIN, _rows(areas, today))


def _rows(areas: Sequence[Area], today: datetime.date) -> str:
    records = read_records()
    lines = ["| area | shows | result | min | date, commit, machine | last pass |", "|---|---|---|---|---|---|"]
    for area in areas:
        last, passed = (records.get(area.name, {}).get(kind) for kind in ("last", "passed"))
        red = why_red(area.name, records, today)
        outcome = f"{last.result}{f': {last.reason}' if last.reason else ''}" if last else "not yet run"
        cells = [
            area.shows,
            f"**RED** {outcome}" if red else outcome,
            f"{last.minutes:.1f}" if last else "-",
            f"{last.date}, {last.commit}, {last.machine}" if last else "-",
            f"{passed.date}, {passed.commit}" if passed else "-",
        ]
        lines.append(f"| `{area.name}` | " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join([*lines, _gpu_row()])


def _gpu_row() -> str:
    """The last record of a GPU, which makes nothing red."""
    records = json.loads(GPU_RECORDS.read_text())
    newest = max(records, key=lambda record: record["date"])
    passed = sum(record["passed"] for record in records)
    what = "parts on a GPU ([gpu.md](gpu.md))"
    return f"| `gpu-test` | {what} | {passed} of {len(records)} passed | - | {newest['date']}, {newest['card']} | - |"


def shortened(reason: str) -> str:
    """A reason as a cell of the table holds it."""
    line = " ".join(reason.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} ..."
