"""Write docs/chaos.md, chaos.json and chaos.png from the kept rounds and the results of arithmetic.py."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.chaos.kept_rounds import kept_rounds
from benchmarks.chaos.page import ENGINES, PAGE
from benchmarks.chaos.workloads import SIMULATED, WORKLOADS
from benchmarks.harness.plots import panels
from benchmarks.harness.section import Record
from benchmarks.harness.tables import side_by_side, table
from gspo.view.picture.curves import BLUE, GREY, ORANGE

_SETTLEMENTS = ("trained", "filtered", "stale", "failed", "unused")
_PLACES = {True: "simulated", False: "real engines"}


def write_report(results: Path, seed: int, out: Path) -> None:
    """Write page, figures and plot of every kept round of a seed."""
    out.mkdir(parents=True, exist_ok=True)
    rounds = kept_rounds(results, seed)
    for played in rounds:
        for fault in played["faults"]:
            fault["is_simulated"] = played["workload"] == SIMULATED.name
    (out / "chaos.json").write_text(json.dumps({"seed": seed, "rounds": rounds}, indent=1) + "\n")
    faults = pd.json_normalize(rounds, "faults")
    _draw(faults, out / "chaos.png")
    engines = [json.loads(path.read_text()) for path in sorted(results.glob("learns-seed-*.json"))]
    (out / "chaos.md").write_text(_render(seed, rounds, faults, engines))


def _render(seed: int, rounds: list[Record], faults: pd.DataFrame, engines: list[Record]) -> str:
    frame = pd.json_normalize(rounds)
    in_place = faults.is_simulated.value_counts()
    return PAGE.format(
        seed=seed,
        num_faults=len(faults),
        num_kinds=faults.kind.nunique(),
        num_rounds=len(rounds),
        num_simulated=in_place.get(True, 0),
        num_engines=in_place.get(False, 0),
        steps=f"{frame.steps.sum():,}",
        issued=f"{frame['groups.issued'].sum():,}",
        verdict=_verdict(rounds),
        machines=_machines(rounds),
        kinds=_kinds(faults),
        findings="\n\n".join(_findings(title, rounds, names) for title, names in _PARTS.items()),
        groups=", ".join(f"{frame[f'groups.{name}'].sum():,} {name}" for name in _SETTLEMENTS),
        dead_letters=frame.dead_letters.sum(),
        rounds=_rounds(rounds),
        breaks=_breaks(rounds),
        engines=ENGINES.format(runs=_runs(engines)) if engines else "",
    )


# The title of a table of invariants, and the workloads in it.
_PARTS = {
    "Simulated": [SIMULATED.name],
    "Real engines": [name for name in WORKLOADS if name != SIMULATED.name],
}


def _verdict(rounds: list[Record]) -> str:
    texts = [text for played in rounds for text in played["broken"]]
    failed = sum("NOT RECOVERED" in text for text in texts)
    if texts:
        return f"Breaches of an invariant: {len(texts) - failed}. Faults without recovery: {failed}."
    return "No invariant was broken, and the run recovered after every fault."


def _machines(rounds: list[Record]) -> str:
    """Cores and processor of each machine that played a round."""
    facts = [played["machine"] for played in rounds]
    return "; ".join(sorted({f"{machine['cores']} cores, {machine['processor']}" for machine in facts}))


def _kinds(faults: pd.DataFrame) -> str:
    """The table of the faults: a row for each kind, with the figures of both places."""
    lasts_s = faults.groupby("kind").lasts_s.first()
    columns: list[Any] = [("fault", lasts_s.index, ""), ("lasts, s", lasts_s.where(lasts_s > 0), "g")]
    for is_simulated, place in _PLACES.items():
        recovered_s = faults[faults.is_simulated == is_simulated].groupby("kind").recovered_s
        for header, values, style in (
            (f"{place}: times", recovered_s.size(), ".0f"),
            ("recovered after, s: median", recovered_s.median(), ".1f"),
            ("most", recovered_s.max(), ".1f"),
            ("never", recovered_s.size() - recovered_s.count(), ".0f"),
        ):
            columns.append((header, values.reindex(lasts_s.index), style))
    return table(*columns)


def _findings(title: str, rounds: list[Record], workloads: list[str]) -> str:
    """The table of the invariants that were checked after rounds of these workloads."""
    chosen = [played for played in rounds if played["workload"] in workloads]
    if not chosen:
        return f"{title}: no round yet."
    by_number = pd.json_normalize(chosen, "findings").groupby("number")
    return table(
        (f"{title}: invariant", [f"{number}. {what}" for number, what in by_number.what.first().items()], ""),
        ("checked", by_number.seen.agg(_total), ""),
        ("broken", [len(texts) or "never" for texts in by_number.broken.sum()], ""),
    )


def _rounds(rounds: list[Record]) -> str:
    frame = pd.json_normalize(rounds)
    return table(
        ("round", frame.workload + " " + frame.number.astype(str), ""),
        ("began, UTC", frame.began_unix_s.map(_utc), ""),
        ("commit", frame.commit, ""),
        ("faults", frame.faults.map(len), "d"),
        ("planned", frame.planned, "d"),
        ("steps", frame.steps, "d"),
        ("groups", frame["groups.issued"], "d"),
        ("minutes", frame.wall_s / 60, ".0f"),
        ("broken", [len(texts) or "nothing" for texts in frame.broken], ""),
    )


def _breaks(rounds: list[Record]) -> str:
    """A list of everything that went wrong, round by round."""
    lists = (
        f"Broken in {played['workload']} {played['number']} (commit {played['commit']}):\n\n"
        + "\n".join(f"- {text}" for text in played["broken"][:20])
        + "\n\n"
        for played in rounds
        if played["broken"]
    )
    return "".join(lists)


def _runs(engines: list[Record]) -> str:
    """The table of the runs of arithmetic.py."""
    names = {"alone": "undisturbed", "struck": "killed"}
    rows: list[dict[str, Any]] = [
        {
            **pair[name],
            "run": f"seed {pair['seed']}, {label}",
            "began": _utc(pair["began_unix_s"]),
            "kills": ", ".join(f"{kill['who']} {kill['step']}" for kill in pair["kills"]) if name == "struck" else "",
        }
        for pair in engines
        for name, label in names.items()
    ]
    frame = pd.json_normalize(rows)
    accuracy = side_by_side((frame.accuracy_after, ".3f"), (frame.accuracy_after_stderr, ".3f"), separator=" ± ")
    return table(
        ("run", frame.run, ""),
        ("began, UTC", frame.began, ""),
        ("accuracy before", frame.accuracy_before, ".3f"),
        ("after", accuracy, ""),
        *((f"groups {name}", frame[f"groups.{name}"], "d") for name in ("issued", "trained", "unused")),
        ("total, s", frame.wall_s, ".0f"),
        ("killed at step", frame.kills, ""),
    )


def _utc(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(unix_s))


def _total(counts: pd.Series[str]) -> str:
    """Add up texts such as "700 steps" or "8 rollouts, 2 groups", unit by unit."""
    totals: Counter[str] = Counter()
    for part in ", ".join(counts).split(", "):
        number, _, unit = part.partition(" ")
        totals[unit] += int(number)
    return ", ".join(f"{number:,} {unit}" for unit, number in totals.items())


def _draw(faults: pd.DataFrame, path: Path) -> None:
    """Seconds to recover: a dot for each fault, by kind."""
    kinds = faults.groupby("kind")
    row = kinds.ngroup()
    with panels(path, "How soon has a run recovered?", height=0.25 * len(kinds) + 1.4) as (axis,):
        for is_simulated, color in ((True, BLUE), (False, ORANGE)):
            chosen = faults.is_simulated == is_simulated
            axis.plot(faults.recovered_s[chosen], row[chosen], "o", color=color, alpha=0.6, label=_PLACES[is_simulated])
        axis.plot(kinds.lasts_s.first(), range(len(kinds)), "|", color=GREY, markersize=14, label="end of the fault")
        axis.set_yticks(range(len(kinds)), list(kinds.groups))
        axis.invert_yaxis()
        axis.set_xlabel("seconds from the start of a fault")
