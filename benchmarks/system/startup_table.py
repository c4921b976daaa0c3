"""The table of the start. Pure: results in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.tables import Record, number, table

PROCESSES = ("gspo run", "coordinator", "generation", "reward", "learner", "others")


def start(found: Sequence[Record]) -> str:
    """Seconds to the end of the checks and to the first answer, and processor time by process."""
    header = ("", "checked, s", "first answer, s", *PROCESSES, "processor time, s")
    rows = [
        [
            f"start {case['number']}",
            number(case["reached_s"]["checked"]),
            number(case["reached_s"]["first answer"]),
            *(number(case["processor_s"].get(name, 0.0)) for name in PROCESSES),
            number(sum(case["processor_s"].values())),
        ]
        for case in found
    ]
    return table(header, rows)
