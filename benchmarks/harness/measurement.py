"""One thing to measure, and the results of a part on disk: written after every case, read to make the page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import machine_facts


@dataclass(frozen=True)
class Measurement:
    """A measurement that takes a minute or two.

    Attributes:
        measure: Called with `arguments`; returns what was found, ready for JSON.
    """

    label: str
    measure: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]


class SectionResults:
    """What one part has found, in one file; a new run of the part starts it anew."""

    def __init__(self, folder: Path, part: str) -> None:
        self._path, self._part = folder / f"{part}.json", part
        self._cases: list[dict[str, Any]] = []

    def add(self, case: Measurement) -> None:
        """Measure a case and keep what it gave."""
        began = time.monotonic()
        found = case.measure(*case.arguments)
        self._cases.append({"label": case.label, "took_s": time.monotonic() - began, **found})
        record = {"part": self._part, "measured_unix_s": time.time(), "machine": machine_facts(), "cases": self._cases}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(record, indent=1) + "\n")


def load_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Part -> its newest results."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
