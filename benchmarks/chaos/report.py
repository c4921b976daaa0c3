"""Write docs/chaos.md, chaos.json and chaos.png from the results of the rounds and of arithmetic.py."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.harness.section import machine_facts


def write_report(results: Path, seed: int, out: Path) -> None:
    """Write page, figures and plot of every round of a seed."""
    rounds = [json.loads(path.read_text()) for path in sorted(results.glob(f"seed-{seed}-round-*.json"))]
    rounds.sort(key=lambda one: one["number"])
    (out / "chaos.json").write_text(json.dumps({"seed": seed, "rounds": rounds}, indent=1) + "\n")
    _plot(rounds, out / "chaos.png")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        autoescape=False,  # noqa: S701 - Markdown
    )  # fmt: skip
    page = environment.get_template("chaos.md.j2").render(
        seed=seed,
        rounds=rounds,
        kinds=_by_kind(rounds),
        machine=machine_facts(),
        findings=_findings(rounds),
        learns=[json.loads(path.read_text()) for path in sorted(results.glob("learns-seed-*.json"))],
    )
    (out / "chaos.md").write_text(page)


def _by_kind(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kind of fault."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in rounds:
        for struck in one["struck"]:
            found[struck["kind"]].append(struck)
    rows = []
    for kind, struck in sorted(found.items()):
        seconds = [one["recovered_s"] for one in struck if one["recovered_s"] is not None]
        rows.append(
            {
                "kind": kind,
                "times": len(struck),
                "lasts_s": struck[0]["lasts_s"],
                "median_s": median(seconds) if seconds else None,
                "most_s": max(seconds, default=None),
                "not_well": len(struck) - len(seconds),
            }
        )
    return rows


def _findings(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each invariant, over all rounds."""
    rows: dict[int, dict[str, Any]] = {}
    for played in rounds:
        for finding in played["findings"]:
            row = rows.setdefault(finding["number"], {**finding, "seen": [], "broken": []})
            row["seen"].append(finding["seen"])
            row["broken"] += finding["broken"]
    return [{**rows[number], "seen": _total(rows[number]["seen"])} for number in sorted(rows)]


def _total(counts: list[str]) -> str:
    """Add up texts such as "700 steps" or "8 rollouts, 2 groups", unit by unit."""
    totals: dict[str, int] = defaultdict(int)
    for part in (part for text in counts for part in text.split(", ")):
        number, _, unit = part.partition(" ")
        totals[unit] += int(number)
    return ", ".join(f"{number:,} {unit}" for unit, number in totals.items())


def _seconds(rounds: list[dict[str, Any]], kind: str) -> list[float]:
    struck = [one for played in rounds for one in played["struck"] if one["kind"] == kind]
    return [one["recovered_s"] for one in struck if one["recovered_s"] is not None]


def _plot(rounds: list[dict[str, Any]], path: Path) -> None:
    """Draw the seconds to recover: a dot for each fault, by kind."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = _by_kind(rounds)
    figure, axes = pyplot.subplots(figsize=(9, 0.35 * len(rows) + 1.2))
    for place, row in enumerate(rows):
        seconds = _seconds(rounds, row["kind"])
        axes.plot(seconds, [place] * len(seconds), "o", color="tab:blue", alpha=0.6)
        axes.plot([row["lasts_s"]] * 2, [place - 0.35, place + 0.35], color="tab:gray")
    axes.set_yticks(range(len(rows)), [row["kind"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the start of a fault until the run has recovered (grey: its duration)")
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
