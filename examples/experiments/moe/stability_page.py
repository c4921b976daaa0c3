"""docs/moe.md from the runs of the mixture-of-experts benchmark: tables, a plot, and all numbers as JSON beside it.

The text above the line GENERATED is written by hand and stays.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness.page import write_below
from benchmarks.harness.plots import panels
from benchmarks.harness.section import Record
from benchmarks.harness.tables import table
from examples.experiments.moe.comparison_run import COMPARED
from gspo.view.picture.curves import BLUE, ORANGE

NAME = "moe"
GENERATED = "<!-- Below this line: written by python -m examples.experiments moe -->"
_LAST = 10  # steps at the end of a run over which a mean is taken
# Label of a row, the figure of a run in it, and the format of its numbers.
Row = tuple[str, str, str]
_TRAINING: tuple[Row, ...] = (
    ("held-out accuracy, sampled, before", "accuracy_before", ".3f"),
    ("held-out accuracy, sampled, after", "accuracy_after", ".3f"),
    (f"reward, mean of the last {_LAST} steps", "last_reward_mean", ".3f"),
    ("clipped share of tokens", "mean_clipped_tokens", ".2%"),
    ("clipped share of sequences (any token)", "mean_clipped_sequences", ".2%"),
    ("log-ratio of a token: standard deviation", "mean_token_log_ratio_std", ".2e"),
    ("log-ratio of a sequence: standard deviation", "mean_log_ratio_std", ".2e"),
    ("log-ratio of a token: largest in the run", "max_token_log_ratio_max", ".2f"),
    ("mismatch of engine and learner, token", "mean_sigma_token", ".2e"),
    ("mismatch of engine and learner, sequence", "mean_sigma_sequence", ".2e"),
    ("gradient norm, mean", "mean_grad_norm", ".3f"),
    ("gradient norm, largest in the run", "max_grad_norm", ".2f"),
    (f"entropy, mean of the last {_LAST} steps", "last_entropy", ".3f"),
)
_EXPERTS: tuple[Row, ...] = (
    ("bfloat16 engine against float32 learner, same weights: tokens", "bfloat16.tokens", ".2%"),
    ("the same, over tokens and layers", "bfloat16.layers", ".2%"),
    ("float32 engine against float32 learner, same weights: tokens", "float32.tokens", ".2%"),
    ("learner before against after one step: tokens", "one_step.tokens", ".2%"),
    ("the same, over tokens and layers", "one_step.layers", ".2%"),
    ("share of the busiest expert of a layer (1/16 is balance)", "busiest", ".2%"),
)
# Title of a panel, its figures with their lines, and its least value.
_PANELS: tuple[tuple[str, dict[str, str], float | None], ...] = (
    ("reward, mean of a step", {"reward_mean": "-"}, None),
    ("clipped share of tokens", {"clipped_tokens": "-"}, 1e-5),
    ("log-ratio, std: token (solid), sequence (dashed)", {"token_log_ratio_std": "-", "log_ratio_std": "--"}, None),
    ("engine against learner, std: token, sequence", {"sigma_token": "-", "sigma_sequence": "--"}, None),
)


def write_page(runs: Sequence[Record], folder: Path) -> Path:
    """Write the page, its plot and its numbers to `folder`; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    _draw(runs, folder / f"{NAME}-stability.png")
    (folder / f"{NAME}.json").write_text(json.dumps(list(runs), indent=None) + "\n")
    return write_below(folder / f"{NAME}.md", GENERATED, _render(runs), "# Mixture of experts\n")


def _render(runs: Sequence[Record]) -> str:
    machine, newest = runs[0]["machine"], max(run["measured_unix_s"] for run in runs)
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    figures = pd.DataFrame([_figures(run) for run in runs]).groupby("algorithm").agg(["mean", "min", "max"])
    shares = [figures.loc[algorithm, ("mean_clipped_tokens", "mean")] for algorithm in COMPARED]
    ratio = f"{shares[0] / shares[1]:,.0f}" if shares[1] else "no token of the second was clipped"
    measured = (
        f"Measured until {time.strftime('%Y-%m-%d', time.gmtime(newest))} on {machine['processor']}, "
        f"{machine['cores']} cores. Packages: {packages}. {len(runs[0]['series']['reward_mean'])} steps, seeds "
        f"{seeds}. Each cell has the mean over the seeds (least to most). Every number: [{NAME}.json]({NAME}.json)."
    )
    paragraphs = (
        measured,
        f"![Reward, clipped share, log-ratio and mismatch over the steps]({NAME}-stability.png)",
        _table(figures, _TRAINING),
        f"Tokens that GSPO clips for each one that GRPO clips: {ratio}.",
        "Experts, at the answers' tokens of the last step:",
        _table(figures, _EXPERTS),
    )
    return "\n\n".join(paragraphs)


def _figures(run: Record) -> Record:
    """The figures of a run, by the names in the rows."""
    series = pd.DataFrame(run["series"]).astype(float)
    return {
        "algorithm": run["algorithm"],
        **series.mean().add_prefix("mean_"),
        **series.max().add_prefix("max_"),
        **series.tail(_LAST).mean().add_prefix("last_"),
        "accuracy_before": run["accuracy"][0]["mean"],
        "accuracy_after": run["accuracy"][-1]["mean"],
        **pd.json_normalize(run["experts"]).iloc[0],
    }


def _table(figures: pd.DataFrame, rows: Sequence[Row]) -> str:
    def cell(algorithm: str, name: str, style: str) -> str:
        mean, least, most = (format(figures.loc[algorithm, (name, key)], style) for key in ("mean", "min", "max"))
        return f"{mean} ({least} to {most})"

    columns = ((a.upper(), [cell(a, name, style) for _, name, style in rows], "") for a in COMPARED)
    return table(("", [label for label, _, _ in rows], ""), *columns)


def _draw(runs: Sequence[Record], path: Path) -> None:
    """Every seed thin, and the mean of the seeds."""
    question = "What the ratio's kind does to a mixture of experts"
    with panels(path, question, rows=2, columns=2, height=5.4, share_y=False) as axes:
        for axis, (title, lines, least) in zip(axes, _PANELS, strict=True):
            for algorithm, colour in zip(COMPARED, (BLUE, ORANGE), strict=True):
                for name, line in lines.items():
                    style: dict[str, Any] = {"ax": axis, "color": colour, "linestyle": line, "legend": False}
                    series = [run["series"][name] for run in runs if run["algorithm"] == algorithm]
                    seeds = pd.DataFrame(series, dtype=float).T.clip(lower=least)
                    seeds.index += 1  # steps count from 1
                    seeds.add_prefix("_").plot(**style, linewidth=0.6, alpha=0.35)
                    seeds.mean(axis=1).plot(**style, linewidth=1.6, label=algorithm.upper() if line == "-" else "_")
            axis.set_title(title, fontsize=9)
        for axis in axes[1:]:
            axis.set_yscale("log")
        for axis in axes[2:]:
            axis.set_xlabel("step")
