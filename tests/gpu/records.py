"""Results of parts: a JSON file of records, and the rows of docs/gpu.md that are made from it.

It runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.gpu.catalogue import PARTS
from tests.gpu.machine_facts import ROOT

RECORDS, PAGE = ROOT / "docs/gpu.json", ROOT / "docs/gpu.md"
_BEGIN, _END = "<!-- rows: python -m tests.gpu -->", "<!-- end of rows -->"
_NONE_YET = "**No row has been run yet: there was no GPU.**"
_LONGEST_REASON = 300


@dataclass(frozen=True)
class PartRecord:
    """What one part gave on one card.

    Attributes:
        reason: Why it failed; empty where it passed.
        numbers: What it measured, by a name that has the unit.
        card: The GPU's name; CPU for a trial of the code.
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

    @property
    def words(self) -> str:
        """The outcome in one line."""
        numbers = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.numbers.items())
        outcome = "pass" if self.passed else f"FAIL: {self.reason[:_LONGEST_REASON]}"
        return f"{outcome}; {numbers}" if numbers else outcome


def read_records(path: Path) -> list[PartRecord]:
    """The records of a file; none where there is no file."""
    return [PartRecord(**given) for given in json.loads(path.read_text())] if path.exists() else []


def merge(path: Path, records: Sequence[PartRecord]) -> None:
    """Put records into a file; of the same part on the same card and versions the last one stays."""
    kept = {(record.part, record.card, record.versions): record for record in [*read_records(path), *records]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(record) for record in kept.values()], indent=1) + "\n")


def write_page(page: Path, records: Sequence[PartRecord]) -> None:
    """Make the rows of the page anew; the rest of it stays."""
    text = page.read_text()
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    page.write_text(f"{before}{_BEGIN}\n{rows(records)}\n{_END}{after}")


def rows(records: Sequence[PartRecord]) -> str:
    """The table, a row a record and one for every part without any."""
    lines = ["" if records else f"{_NONE_YET}\n"]
    lines += ["| part | shows | date, card, driver | versions | s | result |", "|---|---|---|---|---|---|"]
    for name, part in PARTS.items():
        found = [record for record in records if record.part == name]
        lines += [_row(part.what, record) for record in found] or [
            f"| `{name}` | {part.what} | - | - | - | not yet run |"
        ]
    return "\n".join(lines)


def _row(what: str, record: PartRecord) -> str:
    where = f"{record.date}, {record.card}, {record.driver}"
    words = record.words.replace("|", "/").replace("\n", " ")
    return f"| `{record.part}` | {what} | {where} | {record.versions} | {record.seconds:.0f} | {words} |"
