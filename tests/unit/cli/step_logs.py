"""A log of steps with answers without a score, as far as the command line reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# Reasons that differ in the answer alone.
WHY = "r: raised ValueError: cannot judge '{}' (r.py line 5)"


def write_log(run_dir: Path, failures: dict[int, list[str | None]]) -> None:
    """Write step files with the column `failure`, None for a scored answer, and the figures of the steps."""
    (run_dir / "log").mkdir(parents=True)
    lines = []
    for step, reasons in failures.items():
        table = pa.table({"failure": pa.array(reasons, pa.string())})
        pq.write_table(table, run_dir / "log" / f"step-{step:06d}.parquet")
        figures = {"skipped_failed": float(sum(reason is not None for reason in reasons))}
        lines.append(json.dumps({"step": step, "version": step, "unix_s": 1.0, "figures": figures}) + "\n")
    (run_dir / "log" / "metrics.jsonl").write_text("".join(lines))
