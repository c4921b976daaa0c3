"""`python -m tests.planted [NAME ...]`: run the arithmetic example with each planted fault, and keep its figures.

A run that is in the file is not made again, unless it is named. The rules are applied to the file by
tests/unit/common/telemetry/test_planted_runs.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import CACHE
from benchmarks.harness.example import make_cold_start, write_example
from benchmarks.harness.gspo_run import finished_run
from benchmarks.harness.kept_runs import KeptRuns
from tests.planted.faults import FAULTS, copied_model

KEPT = Path(__file__).with_name("figures.json")


def record(name: str) -> dict[str, Any]:
    """Make a run and return the figures that rules may read, its evaluations and its checks."""
    fault, cold_start = FAULTS[name], make_cold_start("seed-0", "--seed", "0")
    sections: dict[str, Any] = {key: dict(values) for key, values in fault.sections.items()}
    sections.setdefault("run", {})["total_steps"] = fault.steps
    if sections.get("evaluation", {}).get("prompts"):
        sections["evaluation"]["prompts"] = str(cold_start / sections["evaluation"]["prompts"])
    folder = CACHE / "planted" / name
    folder.mkdir(parents=True, exist_ok=True)
    if fault.change_model:
        sections["model"] = {"path": str(copied_model(cold_start / "model", folder, fault.change_model))}
    if fault.reward:
        (folder / "reward.py").write_text(fault.reward)
        sections.setdefault("reward", {})["functions"] = [{"path": str(folder / "reward.py")}]
    if fault.agent:
        (folder / "agent.py").write_text(fault.agent)
        sections |= {"agent": {"path": str(folder / "agent.py")}, "gateway": {"replicas": 1}}
        sections["reward"]["functions"] = []
    folder_words = f"{cold_start}/"  # of this machine, and left out of the record
    run = finished_run(write_example(f"planted-{name}", cold_start, **sections))
    return {
        "steps": [line["figures"] | {"step": line["step"]} for line in map(_shortened, run.lines("metrics.jsonl"))],
        "evaluations": run.lines("evaluations.jsonl"),
        "checks": [it | {"seen": it["seen"].replace(folder_words, "")} for it in run.lines("checks.jsonl")],
    }


def _shortened(line: dict[str, Any]) -> dict[str, Any]:
    """Without times, which are not the same twice, and to four digits."""
    figures = {name: float(f"{value:.4g}") for name, value in line["figures"].items() if not name.endswith("_s")}
    return line | {"figures": figures}


if __name__ == "__main__":
    names = sys.argv[1:]
    KeptRuns(KEPT).make(names or list(FAULTS), record, again=bool(names))
