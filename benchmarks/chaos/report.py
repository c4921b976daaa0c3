"""Write docs/chaos.md, chaos.json and chaos.png from the results of the rounds and of arithmetic.py."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness.plots import panels
from benchmarks.harness.section import Record, machine_facts
from benchmarks.harness.tables import side_by_side, table
from gspo.cli.report.panels import BLUE, GREY

_PAGE = """# Chaos

`make chaos` writes this page. It runs two generators and two reward replicas, injects one fault after another, and \
checks the run's log afterwards. Seed {seed} repeats this schedule: kinds, order, targets and pauses.

**{num_faults} faults in {num_rounds} rounds, {steps} steps, {issued} groups. {verdict}**

Coordinator, generation and reward services, learner, Redis, streams, push and log are real. Engine and training step \
are simulated (`benchmarks/simulated`): they take time, and every log-prob is a function of token, position and \
weights, so the check can compute it again. Each process has its own network namespace. The run directory, with \
Redis's file, is on a disk of 256 MiB. The machine has {cores} cores ({processor}) and was shared with other work. A \
round leaves out faults that no longer fit into its time.

## Faults

A fault ends (`lasts`) when the process continues, the network is back, or disk space is free. The run has *recovered* \
when every process runs, every generator has the newest weights, and two more steps are trained. Seconds count from \
the start of the fault.

{kinds}

- `kill`, `stop`: SIGKILL, or SIGSTOP for 20 s.
- `flush redis`: FLUSHALL.
- `cut network`: packets between two processes, or a process and Redis, are dropped without a reset.
- `fill disk`: no byte is free for log, checkpoints and Redis's file.
- `corrupt push`: one bit of a weight frame changes in transit.
- `hang reward`: the reward function stops answering.
- `clock back`: the wall clock of one process moves back by ten minutes, then forward again. Its monotonic clock is \
unchanged.

![Seconds to recover](chaos.png)

## Invariants

{findings}

Groups over all rounds: {groups}. Dead letters: {dead_letters}.

{breaks}{engines}Every fault with its target and time is in [chaos.json](chaos.json).
"""
_ENGINES = """## With the real engines

The arithmetic example (vLLM, DeepSpeed) runs once undisturbed and once with periodic SIGKILLs of a service or Redis \
(`python -m benchmarks chaos-engines`). Accuracy is of 1,000 answers to 250 held-out problems, with its standard \
error. Undisturbed runs of different seeds differ by up to 0.05.

{runs}

"""


def write_report(results: Path, seed: int, out: Path) -> None:
    """Write page, figures and plot of every round of a seed."""
    rounds = [json.loads(path.read_text()) for path in results.glob(f"seed-{seed}-round-*.json")]
    rounds.sort(key=lambda played: int(played["number"]))
    (out / "chaos.json").write_text(json.dumps({"seed": seed, "rounds": rounds}, indent=1) + "\n")
    faults = pd.json_normalize(rounds, "faults")
    _draw(faults, out / "chaos.png")
    engines = [json.loads(path.read_text()) for path in sorted(results.glob("learns-seed-*.json"))]
    (out / "chaos.md").write_text(_render(seed, rounds, faults, engines))


def _render(seed: int, rounds: list[Record], faults: pd.DataFrame, engines: list[Record]) -> str:
    frame, findings = pd.json_normalize(rounds), pd.json_normalize(rounds, "findings")
    recovered = faults.groupby("kind").recovered_s
    failed = int(faults.recovered_s.isna().sum())
    by_number = findings.groupby("number")
    breaks = by_number.broken.sum()  # of lists
    num_breaks = int(breaks.map(len).sum())
    settlements = ("trained", "filtered", "stale", "failed", "unused")
    lasts_s = faults.groupby("kind").lasts_s.first()
    broken = f"{num_breaks} breaches of an invariant, {failed} faults without recovery."
    sound = "No invariant was broken, and the run recovered after every fault."
    lists = (
        f"Broken, invariant {number}:\n\n" + "\n".join(f"- {text}" for text in texts[:20]) + "\n\n"
        for number, texts in breaks.items()
        if texts
    )
    machine = machine_facts()
    return _PAGE.format(
        seed=seed,
        num_faults=len(faults),
        num_rounds=len(rounds),
        steps=frame.steps.sum(),
        issued=frame["groups.issued"].sum(),
        verdict=broken if num_breaks or failed else sound,
        cores=machine["cores"],
        processor=machine["processor"],
        kinds=table(
            ("fault", lasts_s.index, ""),
            ("times", recovered.size(), "d"),
            ("lasts, s", lasts_s.where(lasts_s > 0), "g"),
            ("recovered after, s: median", recovered.median(), ".1f"),
            ("most", recovered.max(), ".1f"),
            ("not within 120 s", recovered.size() - recovered.count(), "d"),
        ),
        findings=table(
            ("invariant", [f"{number}. {what}" for number, what in by_number.what.first().items()], ""),
            ("checked", by_number.seen.agg(_total), ""),
            ("broken", [len(texts) or "never" for texts in breaks], ""),
        ),
        groups=", ".join(f"{frame[f'groups.{name}'].sum()} {name}" for name in settlements),
        dead_letters=frame.dead_letters.sum(),
        breaks="".join(lists),
        engines=_ENGINES.format(runs=_runs(engines)) if engines else "",
    )


def _runs(engines: list[Record]) -> str:
    """The table of the runs with the real engines."""
    names = {"alone": "undisturbed", "struck": "killed"}
    rows: list[dict[str, Any]] = [
        {
            **pair[name],
            "run": f"seed {pair['seed']}, {label}",
            "kills": ", ".join(f"{kill['who']} {kill['step']}" for kill in pair["kills"]) if name == "struck" else "",
        }
        for pair in engines
        for name, label in names.items()
    ]
    frame = pd.json_normalize(rows)
    accuracy = side_by_side((frame.accuracy_after, ".3f"), (frame.accuracy_after_stderr, ".3f"), separator=" ± ")
    return table(
        ("run", frame.run, ""),
        ("accuracy before", frame.accuracy_before, ".3f"),
        ("after", accuracy, ""),
        *((f"groups {name}", frame[f"groups.{name}"], "d") for name in ("issued", "trained", "unused")),
        ("total, s", frame.wall_s, ".0f"),
        ("killed at step", frame.kills, ""),
    )


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
    with panels(path, "How soon has a run recovered?", height=0.3 * len(kinds) + 1.4) as (axis,):
        axis.plot(faults.recovered_s, kinds.ngroup(), "o", color=BLUE, alpha=0.6, label="recovered")
        axis.plot(kinds.lasts_s.first(), range(len(kinds)), "|", color=GREY, markersize=14, label="end of the fault")
        axis.set_yticks(range(len(kinds)), list(kinds.groups))
        axis.invert_yaxis()
        axis.set_xlabel("seconds from the start of a fault")
