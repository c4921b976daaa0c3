"""docs/long.md from the results: the claims with their verdicts, the method, tables, and a plot.

The text above the line GENERATED is written by hand and stays.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.harness.page import write_below
from benchmarks.harness.plots import panels
from benchmarks.harness.section import Record
from benchmarks.harness.tables import table
from examples.experiments.long.claims import LEAST_SEEDS, TOLERANCE, Claim, claims, verdicts
from examples.experiments.long.declared_runs import (
    COUNTED_SEEDS,
    LAST,
    TUNING_SEED,
    Scale,
    declared_runs,
    last_reward,
)
from examples.experiments.moe.comparison_run import COMPARED
from gspo.common.telemetry.clip_causes import ClipCauses, clip_causes
from gspo.view.picture.curves import BLUE, ORANGE

GENERATED = "<!-- Below this line: written by python -m examples.experiments long -->"
_QUIET_SHARE = 0.1
_METHOD = """
## Method

{done} of {declared} runs, until {date}, on {cores} cores. Processor: {processor}. Packages: {packages}. Every number: \
[{json}]({json}). `python -m examples.experiments long` makes the others.

- Task: `examples/long` ({example}), {steps} steps of 8 problems with 8 answers each. Held-out accuracy is of 2 \
answers to each of 64 problems.
- Equal in all runs: generation in bfloat16, `seq-mean-token-mean`. The learner is in float32 with four mini-batches, \
`max_lag: 0` and `old_logprobs: inference`, unless the name of a run says otherwise. The runs `lag-*-recompute`, \
`routing-*` and `bfloat16-*` have `recompute` with `behavior_correction: truncate`.
- GSPO has the clip 3e-4 / 4e-4 of its sequence's ratio, GRPO 0.2 / 0.27 of each token's (arXiv 2507.18071).
- Each learning rate was chosen on seed {tuning_seed}, by the reward of the last {last} steps. So no claim counts this \
seed, and its runs stand in the tables alone.
- A claim has a verdict on {least_seeds} seeds or more, of {counted}. It is confirmed or refuted if the whole 95 % \
interval of the mean over these seeds (Student's t) is on one side of the bound, and undecided otherwise.
- A difference of rewards below {tolerance:g} counts as none. Two runs of equal keys and seed were 0.04 apart.
- With a lag, few steps measure the mismatch.
- {times}
"""
_CAUSES = """
Means over the steps of runs that recorded the causes ([clips.md](clips.md#why-sequences-are-outside-the-clip)). The \
noise is that of the steps that measured it; with recomputed log-probs, neither noise nor lag is in the ratio. The \
last column is the clip, equal on both sides, that leaves at most 1 % of a step to noise: the median over the steps.
""".strip()


def write_page(results: Mapping[str, Record], scale: Scale, page: Path) -> Path:
    """Write the page of some results, and its plot beside it; the page's path."""
    plot = page.with_name(f"{page.stem}-ratio.png")
    page.parent.mkdir(parents=True, exist_ok=True)
    return write_below(page, GENERATED, _render(results, scale, page, plot), "# Long answers\n")


def _render(results: Mapping[str, Record], scale: Scale, page: Path, plot: Path) -> str:
    judged = claims(results)
    paragraphs = [
        f"Of {len(judged)} claims: {', '.join(verdicts(judged))}.",
        _claim_table(judged),
    ]
    if not results:
        return "\n\n".join(paragraphs)
    paragraphs.append(_method(results, scale, page))
    if any(run["experiment"] == "ratio" for run in results.values()):
        _draw(results, plot)
        paragraphs.append(f"![Reward, accuracy, clipped share, entropy, gradient norm, mismatch]({plot.name})")
    paragraphs.append(_run_table(results))
    if causes := {name: split for name, run in results.items() if (split := _causes_of(run))}:
        paragraphs += ["## Why sequences are outside the clip", _CAUSES, _cause_table(causes, results)]
    if mismatch := {name: run["mismatch"] for name, run in results.items() if run.get("mismatch")}:
        paragraphs += ["## Mismatch over answer length", _mismatch_table(mismatch)]
    return "\n\n".join(paragraphs)


def _claim_table(judged: Sequence[Claim]) -> str:
    """A row for each difference; a claim stands at its first one."""
    differences = [difference for claim in judged for difference in claim.differences]
    # The first row of each claim.
    heads = [claim if number == 0 else None for claim in judged for number in range(len(claim.differences))]

    def column(values: Iterable[float | None]) -> list[str]:
        pairs = zip(differences, values, strict=True)
        return ["-" if value is None else difference.shown(value) for difference, value in pairs]

    intervals = [it.interval for it in differences]
    return table(
        ("claim", [claim.text if claim else "" for claim in heads], ""),
        ("verdict", [claim.verdict if claim else "" for claim in heads], ""),
        ("figure", [it.words for it in differences], ""),
        ("at least", column(it.bound for it in differences), ""),
        *((f"seed {seed}", column(it.values.get(seed) for it in differences), "") for seed in COUNTED_SEEDS),
        ("mean", column(it.mean for it in differences), ""),
        ("95 % from", column(interval and interval[0] for interval in intervals), ""),
        ("to", column(interval and interval[1] for interval in intervals), ""),
    )


def _method(results: Mapping[str, Record], scale: Scale, page: Path) -> str:
    newest = max(results.values(), key=lambda run: float(run["measured_unix_s"]))
    busy = max(run["busy_share"] for run in results.values())
    return _METHOD.strip().format(
        done=len(results),
        declared=len(declared_runs()),
        tuning_seed=TUNING_SEED,
        counted=", ".join(map(str, COUNTED_SEEDS)),
        least_seeds=LEAST_SEEDS,
        tolerance=TOLERANCE,
        last=LAST,
        date=time.strftime("%Y-%m-%d", time.gmtime(newest["measured_unix_s"])),
        processor=_processors(results),
        cores=newest["machine"]["cores"],
        packages=", ".join(f"{name} {version}" for name, version in newest["machine"]["packages"].items()),
        json=page.with_suffix(".json").name,
        example=f"`{' '.join(scale.example)}`" if scale.example else "as it is",
        steps=scale.steps,
        times=(
            f"Times are left out: other work took up to {busy:.0%} of the machine when a run began."
            if busy > _QUIET_SHARE
            else "No other work ran on the machine when a run began."
        ),
    )


def _processors(results: Mapping[str, Record]) -> str:
    """The processors of the runs, with the number of runs where there are several."""
    num_runs = Counter(run["machine"]["processor"].replace(";", ",") for run in results.values())
    if len(num_runs) == 1:
        return str(*num_runs)
    return ". Another: ".join(f"{name}, runs: {number}" for name, number in num_runs.most_common())


def _seen(run: Record, name: str) -> list[float]:
    """The values of the steps that have this figure."""
    return [value for value in run["series"].get(name, []) if value is not None]


def _run_table(results: Mapping[str, Record]) -> str:
    runs = [(name, results[name]) for name in declared_runs() if name in results]

    def mean_of(name: str) -> list[float | None]:
        return [fmean(seen) if (seen := _seen(run, name)) else None for _, run in runs]

    quiet = all(run["busy_share"] <= _QUIET_SHARE for _, run in runs)
    return table(
        ("run", [f"{name}, {run['learning_rate']:g}" for name, run in runs], ""),
        ("accuracy before", [run["accuracy"][0]["mean"] for _, run in runs], ".3f"),
        ("after", [run["accuracy"][-1]["mean"] for _, run in runs], ".3f"),
        (f"reward, first {LAST}", [fmean(run["series"]["reward_mean"][:LAST]) for _, run in runs], ".3f"),
        (f"last {LAST}", [last_reward(run) for _, run in runs], ".3f"),
        ("clipped tokens", mean_of("clipped_tokens"), ".2%"),
        ("entropy", mean_of("entropy"), ".4f"),
        ("gradient norm", mean_of("grad_norm"), ".3f"),
        ("log-ratio of a token", mean_of("token_log_ratio_std"), ".2e"),
        ("of a sequence", mean_of("log_ratio_std"), ".2e"),
        ("mismatch of a token", mean_of("sigma_token"), ".2e"),
        ("of a sequence", mean_of("sigma_sequence"), ".2e"),
        (
            "experts changed by a step",
            [run.get("experts", {}).get("one_step", {}).get("tokens") for _, run in runs],
            ".2%",
        ),
        *([("s a step", [median(np.diff(run["seconds"])) for _, run in runs], ".1f")] if quiet else []),
    )


def _causes_of(run: Record) -> ClipCauses | None:
    """Why sequences were outside the clip over all steps; None of a run that did not record it."""
    series = run["series"]
    steps = range(len(series["reward_mean"]))
    return clip_causes([{name: of[step] for name, of in series.items() if of[step] is not None} for step in steps])


def _cause_table(causes: Mapping[str, ClipCauses], results: Mapping[str, Record]) -> str:
    runs = [(name, causes[name], _seen(results[name], "noise_clip")) for name in declared_runs() if name in causes]
    return table(
        ("run", [name for name, _, _ in runs], ""),
        ("outside as trained", [of_run.trained for _, of_run, _ in runs], ".1%"),
        ("at the start", [of_run.at_start for _, of_run, _ in runs], ".1%"),
        ("by noise", [of_run.noise for _, of_run, _ in runs], ".1%"),
        ("by lag", [of_run.lag for _, of_run, _ in runs], ".1%"),
        ("by movement", [of_run.movement for _, of_run, _ in runs], ".1%"),
        ("clip for noise alone", [median(clips) if clips else None for _, _, clips in runs], ".2g"),
    )


def _mismatch_table(measured: Mapping[str, list[Record]]) -> str:
    rows = [(name, row) for name, of_run in measured.items() for row in of_run]
    return table(
        ("run", [name for name, _ in rows], ""),
        ("tokens", [row["tokens"] for _, row in rows], "d"),
        ("std of a token", [row["token"] for _, row in rows], ".2e"),
        ("of a sequence", [row["sequence"] for _, row in rows], ".2e"),
        ("of independent tokens", [row["token"] / row["tokens"] ** 0.5 for _, row in rows], ".2e"),
    )


# Title of a panel, the figure in it, and whether its scale is logarithmic.
_PANELS = (
    ("clipped share of tokens", "clipped_tokens", True),
    ("entropy", "entropy", False),
    ("gradient norm", "grad_norm", True),
    ("mismatch of a sequence, std", "sigma_sequence", True),
)


def _draw(results: Mapping[str, Record], path: Path) -> None:
    """Every run of the ratios: reward over steps and over tokens, and the other figures over steps."""
    runs = {name: run for name, run in results.items() if run["experiment"] == "ratio" and run["algorithm"] in COMPARED}
    question = "What the ratio's kind does to long answers"
    with panels(path, question, rows=3, columns=2, height=8.0, share_y=False) as axes:
        for name, run in runs.items():
            style: dict[str, Any] = {
                "color": dict(zip(COMPARED, (BLUE, ORANGE), strict=True))[run["algorithm"]],
                "linestyle": "-" if run["arm"] == "dense" else "--",
                "linewidth": 1.0,
                "alpha": 0.4 + 0.6 * (run["learning_rate"] == 1e-4),
            }
            steps = range(1, 1 + len(run["series"]["reward_mean"]))
            axes[0].plot(steps, run["series"]["reward_mean"], label=name, **style)
            axes[0].plot(
                [point["step"] for point in run["accuracy"]],
                [point["mean"] for point in run["accuracy"]],
                **style | {"linestyle": "", "marker": "o"},
            )
            axes[1].plot(np.cumsum(run["series"]["tokens"]) / 1e3, run["series"]["reward_mean"], **style)
            for axis, (_, figure, _) in zip(axes[2:], _PANELS, strict=True):
                axis.plot(steps, np.array(run["series"][figure], dtype=float), **style)
        axes[0].set_title("reward over steps (dots: held-out accuracy)", fontsize=9)
        axes[1].set_title("reward over thousands of tokens", fontsize=9)
        for axis, (title, _, is_logarithmic) in zip(axes[2:], _PANELS, strict=True):
            axis.set_title(title, fontsize=9)
            axis.set_yscale("log" if is_logarithmic else "linear")
        for axis in axes[4:]:
            axis.set_xlabel("step")
