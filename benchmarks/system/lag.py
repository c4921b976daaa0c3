"""The section `learning`: the arithmetic example at every lag, with both denominators of the ratio.

One seed a case, so small differences are noise; the table has the standard error of an accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.harness.example import make_cold_start, write_example
from benchmarks.harness.gspo_run import finished_run
from benchmarks.harness.plots import panels
from benchmarks.harness.section import Effort, Measurement, PageSection, Record, Results
from benchmarks.harness.tables import table
from benchmarks.harness.workload import LAGS
from gspo.view.picture.curves import BLUE, GREEN, ORANGE

OLD_LOGPROBS = ("inference", "recompute")
_RUN_S = 1800.0
_EVALUATE_EVERY = 10
_STYLES = {"inference": {"linestyle": "-", "marker": "o"}, "recompute": {"linestyle": "--", "marker": "s"}}
_TEXT = """
The arithmetic example at every lag with both denominators of the ratio (`algorithm.old_logprobs`), one seed, equal \
steps. Accuracy is of 4 sampled answers to each of 250 held-out problems, interpolated between evaluations. Times \
count from the end of the first evaluation. Differences of up to two standard errors are noise, and another seed may \
order the rows differently.

{accuracies}

![Accuracy](benchmarks-learning.png)
"""


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Every lag with both denominators; quick: one case."""
    steps = effort.num_steps(40)
    every = [(max_lag, old_logprobs, steps) for old_logprobs in OLD_LOGPROBS for max_lag in LAGS]
    for case in every[1:2] if effort.quick else every:
        yield Measurement(f"max_lag {case[0]}, old_logprobs {case[1]}, {steps} steps", _measure, case)


def _measure(max_lag: int, old_logprobs: str, num_steps: int) -> Record:
    config = write_example(
        f"learning-{max_lag}-{old_logprobs}",
        make_cold_start("seed-0", "--seed", "0"),
        algorithm={"old_logprobs": old_logprobs},
        staleness={"max_lag": max_lag},
        evaluation={"every": _EVALUATE_EVERY, "limit_between": None},
        run={"total_steps": num_steps},
    )
    run = finished_run(config, timeout_s=_RUN_S)
    evaluations, steps = run.lines("evaluations.jsonl"), run.lines("metrics.jsonl")
    began = evaluations[0]["unix_s"]
    # A version counts from when it was trained, a little before its accuracy is known.
    seconds = [0.0, *(float(line["unix_s"]) - began for line in steps)]
    return {
        "max_lag": max_lag,
        "old_logprobs": old_logprobs,
        "num_steps": num_steps,
        "curve": [
            {
                "step": record["step"],
                "seconds": seconds[record["step"]],
                "accuracy": record["figures"]["sampled_mean"],
                "stderr": record["figures"].get("sampled_stderr"),
            }
            for record in evaluations
        ],
        "rewards": [line["figures"]["reward_mean"] for line in steps],
        "clipped": [line["figures"]["clipped_sequences"] for line in steps],
    }


def text(results: Results) -> str:
    """Accuracy at equal steps and at equal times."""
    cases = results["learning"]
    curves = [pd.DataFrame(case["curve"]) for case in cases]
    columns = []
    for x, header in (("step", "step {:g}"), ("seconds", "{:.0f} s")):
        end = min(curve[x].iloc[-1] for curve in curves)  # the last one that every curve reaches
        accuracies = {at: [np.interp(at, curve[x], curve.accuracy) for curve in curves] for at in (end / 2, end)}
        columns += [(header.format(at), values, ".3f") for at, values in accuracies.items()]
    return _TEXT.format(
        accuracies=table(
            ("", [f"max_lag {case['max_lag']}, {case['old_logprobs']}" for case in cases], ""),
            ("before", [curve.accuracy.iloc[0] for curve in curves], ".3f"),
            *columns,
            ("all steps, s", [curve.seconds.iloc[-1] for curve in curves], ".0f"),
            ("standard error", [curve.stderr.iloc[-1] for curve in curves], ".3f"),
            ("clipped", [np.mean(case["clipped"]) for case in cases], ".0%"),
        )
    )


def draw(results: Results, folder: Path) -> None:
    """Held-out accuracy over steps, and over time."""
    path = folder / "benchmarks-learning.png"
    with panels(path, "What does lag cost, and what does it buy?", columns=2) as axes:
        for axis, x, label in zip(axes, ("step", "seconds"), ("step", "seconds of training"), strict=True):
            for case in results["learning"]:
                curve = pd.DataFrame(case["curve"]).fillna({"stderr": 0.0})
                axis.errorbar(
                    curve[x],
                    curve.accuracy,
                    yerr=curve.stderr,
                    color=(BLUE, ORANGE, GREEN)[case["max_lag"]],
                    label=f"max_lag {case['max_lag']}, {case['old_logprobs']}",
                    markersize=3.5,
                    capsize=2,
                    **_STYLES[case["old_logprobs"]],
                )
            axis.set_xlabel(label)
        axes[0].set_ylabel("held-out accuracy, sampled")


LEARNING = PageSection("learning", "Lag against learning", measurements, text, (draw,))
