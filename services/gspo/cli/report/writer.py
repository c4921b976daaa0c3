"""Writes the report of a run: summary.json, plots/*.png and report.html, from its run directory alone.

A report can be written again at any time, for a run in any state.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gspo.cli.report.history import RunHistory, read_history
from gspo.cli.report.page import render
from gspo.cli.report.plots import write_plots
from gspo.cli.report.summary import summarise
from gspo.cli.rundir.plan import PAGE_NAME, SUMMARY_NAME
from gspo.common.host.durable_write import replace_file

PLOTS_NAME = "plots"


def write_report(
    run_dir: Path, *, wall_s: dict[str, float] | None = None, finished: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write the report and return the summary.

    Args:
        wall_s: Wall-clock seconds of this session by phase.
        finished: `end` and `reason` of the run's end; empty where it came to none. The log holds neither of the
            two: where None is given, those of an earlier report stand, if no step was trained since.
    """
    log = read_history(run_dir)
    earlier = _earlier(run_dir / SUMMARY_NAME, log)
    if wall_s is None:
        wall_s = earlier.get("wall_s")
    if finished is None and earlier.get("end") is not None:
        finished = {"end": earlier["end"], "reason": earlier.get("end_reason")}
    summary = summarise(log, wall_s, finished)
    replace_file(run_dir / SUMMARY_NAME, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    plots = write_plots(log, run_dir / PLOTS_NAME)
    page = render(log, summary, plots, run_dir / PLOTS_NAME)
    replace_file(run_dir / PAGE_NAME, page.encode(errors="replace"))
    return summary


def _earlier(path: Path, log: RunHistory) -> dict[str, Any]:
    """The summary of an earlier report of the same policy; empty where there is none."""
    try:
        summary = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    same = isinstance(summary, dict) and summary.get("policy_version") == log.version
    return dict(summary) if same else {}
