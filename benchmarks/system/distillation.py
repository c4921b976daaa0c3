"""The section `distillation`: the arithmetic example by its rewards, by a larger teacher, and by both, at equal steps.

The teacher is a model of twice the width that has seen right answers alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness.example import make_cold_start, write_example
from benchmarks.harness.gspo_run import ObservedRun, finished_run
from benchmarks.harness.plots import panels
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import table
from gspo.view.picture.curves import BLUE, GREEN, ORANGE, PURPLE

SEEDS = (0,)
REWARDS = "rewards"
# Sections `teacher` of each case, without the path.
CASES: dict[str, Record | None] = {
    REWARDS: None,
    "teacher alone, loss": {"kl_in": "loss", "alone": True},
    "teacher alone, advantage": {"kl_in": "advantage", "alone": True},
    "rewards and teacher, loss": {"kl_in": "loss"},
}
_STEPS, _EVALUATE_EVERY, _RUN_S = 60, 10, 1800.0
_COLORS = dict(zip(CASES, (BLUE, ORANGE, GREEN, PURPLE), strict=True))
# The example's clip is of its rewards; under a loss of the teacher alone it is refused.
_UNCLIPPED: Record = {"pg_clip_low": None, "pg_clip_high": None}
_TEXT = """
The cold start of the arithmetic example ({student:,} parameters) is trained by its rewards, by a teacher, or by both, \
{seeds}. All have an equal number of sampled answers and the same learning rate. The teacher ({teacher:,} parameters) \
has seen right answers alone, and {accuracy:.1%} of its sampled answers to held-out problems are right. Accuracy is of \
4 sampled answers to each of 250 held-out problems. Differences of up to two standard errors are noise.

{accuracies}

![Accuracy](benchmarks-distillation.png)
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Every case of every seed; quick: two cases."""
    for seed in SEEDS:
        for case in list(CASES)[:2] if effort.quick else CASES:
            yield Measurement(f"seed {seed}, {case}", _measure, (seed, case, effort.num_steps(_STEPS)))


def _measure(seed: int, case: str, num_steps: int) -> Record:
    student = make_cold_start(f"seed-{seed}", "--seed", str(seed))
    teacher = make_cold_start(f"teacher-{seed}", "--seed", str(seed), "--teacher")
    facts, teaching = [_facts(folder) for folder in (student, teacher)], CASES[case]
    sections: dict[str, Any] = {}
    if teaching is not None:
        sections["teacher"] = {"path": str(teacher / "model"), **teaching}
        is_loss_alone = teaching["kl_in"] == "loss" and "alone" in teaching
        sections |= {"algorithm": _UNCLIPPED} if is_loss_alone else {}
    config = write_example(
        f"distillation-{seed}-{list(CASES).index(case)}",
        student,
        seed=seed,
        evaluation={"every": _EVALUATE_EVERY, "limit_between": None, "keep_best": None},
        run={"total_steps": num_steps},
        **sections,
    )
    return {
        "seed": seed,
        "case": case,
        "num_steps": num_steps,
        "parameters": [fact["num_parameters"] for fact in facts],
        "teacher_accuracy": facts[1]["held_out_exact_probability"],
        **_figures(finished_run(config, timeout_s=_RUN_S)),
    }


def _facts(cold_start: Path) -> Record:
    facts: Record = json.loads((cold_start / "cold_start.json").read_text())
    return facts


def _figures(run: ObservedRun) -> Record:
    lines, evaluations = run.lines("metrics.jsonl"), run.lines("evaluations.jsonl")
    figures = pd.DataFrame([line["figures"] for line in lines])
    return {
        "tokens": float(figures["tokens"].sum()),
        "step_s": float(figures["step_s"].median()),
        "rewards": figures["reward_mean"].tolist(),
        "teacher_kl": figures["teacher_kl"].tolist() if "teacher_kl" in figures else None,
        "curve": [
            {
                "step": record["step"],
                "accuracy": record["figures"]["sampled_mean"],
                "stderr": record["figures"].get("sampled_stderr"),
            }
            for record in evaluations
        ],
    }


def text(results: Results) -> str:
    """Accuracy at equal steps; a row for each case, the mean over the seeds."""
    measured = results["distillation"]
    seeds = sorted({record["seed"] for record in measured})
    rows = {name: [record for record in measured if record["case"] == name] for name in CASES}
    rows = {name: records for name, records in rows.items() if records}
    last, (student, teacher) = measured[0]["num_steps"], measured[0]["parameters"]

    def accuracy(records: list[Record], step: float) -> float:
        curves = [pd.DataFrame(record["curve"]) for record in records]
        return float(np.mean([np.interp(step, curve.step, curve.accuracy) for curve in curves]))

    def mean(records: list[Record], key: str) -> float:
        return float(np.mean([record[key] for record in records]))

    def divergence(records: list[Record], step: int) -> float | None:
        kls = [record["teacher_kl"][step] for record in records if record["teacher_kl"]]
        return float(np.mean(kls)) if kls else None

    return _TEXT.format(
        student=student,
        teacher=teacher,
        seeds=f"seed {seeds[0]}" if len(seeds) == 1 else f"the mean of {len(seeds)} seeds",
        accuracy=np.mean([record["teacher_accuracy"] for record in measured]),
        accuracies=table(
            ("", rows, ""),
            *[
                (f"step {step:g}" if step else "before", [accuracy(records, step) for records in rows.values()], ".3f")
                for step in (0, last / 6, last / 3, last / 2, last)
            ],
            ("standard error", [records[0]["curve"][-1]["stderr"] for records in rows.values()], ".3f"),
            ("trained tokens", [mean(records, "tokens") for records in rows.values()], ",.0f"),
            ("s a step", [mean(records, "step_s") for records in rows.values()], ".2f"),
            ("KL to the teacher, first step", [divergence(records, 0) for records in rows.values()], ".2f"),
            ("last step", [divergence(records, -1) for records in rows.values()], ".2f"),
        ),
    )


def draw(results: Results, folder: Path) -> None:
    """Held-out accuracy over steps."""
    with panels(folder / "benchmarks-distillation.png", "Does a teacher teach faster than rewards?") as axes:
        for record in results["distillation"]:
            curve = pd.DataFrame(record["curve"]).fillna({"stderr": 0.0})
            axes[0].errorbar(
                curve.step,
                curve.accuracy,
                yerr=curve.stderr,
                color=_COLORS[record["case"]],
                label=record["case"] if record["seed"] == SEEDS[0] else None,
                marker="o",
                markersize=3.5,
                capsize=2,
            )
        axes[0].set_xlabel("step")
        axes[0].set_ylabel("held-out accuracy, sampled")


DISTILLATION = PageSection("distillation", "A teacher against rewards", measurements, text, (draw,))
