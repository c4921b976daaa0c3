"""Results of parts: a JSON file of records, and the rows of docs/gpu.md that are made from it.

It runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.catalogue import PARTS, Part
from tests.gpu.machine_facts import ROOT
from tests.support.documents.page_rows import replace_rows

RECORDS, PAGE = ROOT / "docs/gpu.json", ROOT / "docs/gpu.md"
_BEGIN = "<!-- rows: python -m tests.gpu -->"
_NONE_YET = "**No GPU has run this project yet: no row below has a result.**"
_LONGEST_REASON = 300
_VERDICTS = {True: "goal met", False: "GOAL MISSED", None: "not judged on a CPU"}


@dataclass(frozen=True)
class PartRecord:
    """What one part gave on one GPU.

    Attributes:
        reason: Why it failed; empty where it passed.
        numbers: What it measured, by a name that has the unit.
        card: The GPU's name; CPU for a trial of the code.
        goals: `name`, `goal`, `result`, and whether it is `met`: None on a CPU.
        rates: By the names of cli/plan/rates.py, for `gspo plan`.
    """

    part: str
    passed: bool
    reason: str
    seconds: float
    numbers: dict[str, float | str]
    date: str
    card: str
    driver: str
    versions: str
    goals: list[dict[str, Any]] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """Whether it passed, and every number that has a goal beside it."""
        outcome = "pass" if self.passed else f"FAIL: {self.reason[:_LONGEST_REASON]}"
        goals = [f"{goal['name']} {goal['result']:g}: {_VERDICTS[goal['met']]}" for goal in self.goals]
        return ". ".join(text[0].upper() + text[1:] for text in (outcome, *goals))

    @property
    def further(self) -> str:
        """The other numbers."""
        numbers = ", ".join(f"{name} {value}" for name, value in self.numbers.items())
        return f"`{numbers}`" if numbers else ""


def read_records(path: Path) -> list[PartRecord]:
    """The records of a file; none where there is no file."""
    return [PartRecord(**given) for given in json.loads(path.read_text())] if path.exists() else []


def merge(path: Path, records: Sequence[PartRecord]) -> None:
    """Put records into a file; of the same part on the same GPU and versions the last one stays.

    They are in the order of the catalogue: of two parts with one rate, `gspo plan` takes that of the later one.
    """
    kept = {(record.part, record.card, record.versions): record for record in [*read_records(path), *records]}
    place = {name: number for number, name in enumerate(PARTS)}
    ordered = sorted(kept.values(), key=lambda record: place.get(record.part, -1))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(record) for record in ordered], indent=1) + "\n")


def write_page(page: Path, records: Sequence[PartRecord]) -> None:
    """Make the rows of the page anew; the rest of it stays."""
    replace_rows(page, _BEGIN, rows(records))


def rows(records: Sequence[PartRecord]) -> str:
    """The table, a row a record and one for every part without any."""
    lines = ["" if records else f"{_NONE_YET}\n"]
    lines += ["| part | shows | goal | result | further numbers | s | date, GPU, driver, versions |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, part in PARTS.items():
        of_part = [record for record in records if record.part == name]
        lines += [_row(part, record) for record in of_part] or [
            f"| `{name}` | {part.what} | {part.goal} | not yet run | - | - | - |"
        ]
    return "\n".join(lines)


def _row(part: Part, record: PartRecord) -> str:
    where = f"{record.date}, {record.card}, {record.driver}, {record.versions}"
    cells = (part.what, part.goal, record.outcome, record.further or "-", f"{record.seconds:.0f}", where)
    return f"| `{record.part}` | " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
