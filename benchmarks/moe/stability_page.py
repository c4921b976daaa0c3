"""docs/moe.md from the runs of the mixture-of-experts benchmark: tables, a plot, and all numbers as JSON beside it.

The text above the line GENERATED is written by hand and stays.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.harness.tables import number, table
from benchmarks.moe.comparison_run import ALGORITHMS
from gspo.cli.report.panels import BLUE, ORANGE, STYLE

NAME = "moe"
GENERATED = "<!-- Below this line: written by python -m benchmarks.moe.stability -->"
_COLOURS = dict(zip(ALGORITHMS, (BLUE, ORANGE), strict=True))
_DPI = 150
_LAST = 10  # steps at the end of a run over which a mean is taken

Run = dict[str, Any]


def write_page(runs: Sequence[Run], folder: Path) -> Path:
    """Write the page, its plot and its numbers to `folder`; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{NAME}.md"
    by_hand = page.read_text().partition(GENERATED)[0] if page.exists() else "# Mixture of experts\n"
    _draw(runs, folder / f"{NAME}-stability.png")
    page.write_text(f"{by_hand.rstrip()}\n\n{GENERATED}\n{_render(runs)}")
    (folder / f"{NAME}.json").write_text(json.dumps(list(runs), indent=None) + "\n")
    return page


def _render(runs: Sequence[Run]) -> str:
    machine, newest = runs[0]["machine"], max(run["measured_unix_s"] for run in runs)
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    seeds = sorted({run["seed"] for run in runs})
    measured = (
        f"Measured until {time.strftime('%Y-%m-%d', time.gmtime(newest))} on {machine['processor']}, "
        f"{machine['cores']} cores. Packages: {packages}. {len(runs[0]['series']['reward_mean'])} steps, seeds "
        f"{', '.join(map(str, seeds))}. Each cell has the mean over the seeds (least to most). "
        f"Every number: [{NAME}.json]({NAME}.json)."
    )
    paragraphs = (
        measured,
        f"![Reward, clipped share, log-ratio and mismatch over the steps]({NAME}-stability.png)",
        _table(runs, _TRAINING),
        f"Tokens that GSPO clips for each one that GRPO clips: {_clip_ratio(runs)}.",
        "Experts, at the answers' tokens of the last step:",
        _table(runs, _EXPERTS),
    )
    return "\n" + "\n\n".join(text.strip() for text in paragraphs) + "\n"


def _over_run(name: str) -> Callable[[Run], float]:
    return lambda run: _mean(run["series"][name])


def _at_end(name: str) -> Callable[[Run], float]:
    return lambda run: _mean(run["series"][name][-_LAST:])


def _worst(name: str) -> Callable[[Run], float]:
    return lambda run: max(run["series"][name])


def _accuracy(place: int) -> Callable[[Run], float]:
    return lambda run: float(run["accuracy"][place]["mean"])


def _changed(by: str, unit: str) -> Callable[[Run], float | None]:
    return lambda run: run["experts"].get(by, {}).get(unit)


# Label of a row, its value in a run (None if not measured), and the format of its numbers.
Row = tuple[str, Callable[[Run], float | None], str]
_TRAINING: tuple[Row, ...] = (
    ("held-out accuracy, sampled, before", _accuracy(0), ".3f"),
    ("held-out accuracy, sampled, after", _accuracy(-1), ".3f"),
    (f"reward, mean of the last {_LAST} steps", _at_end("reward_mean"), ".3f"),
    ("clipped share of tokens", _over_run("clipped_tokens"), ".2%"),
    ("clipped share of sequences (any token)", _over_run("clipped_sequences"), ".2%"),
    ("log-ratio of a token: standard deviation", _over_run("token_log_ratio_std"), ".2e"),
    ("log-ratio of a sequence: standard deviation", _over_run("log_ratio_std"), ".2e"),
    ("log-ratio of a token: largest in the run", _worst("token_log_ratio_max"), ".2f"),
    ("mismatch of engine and learner, token", _over_run("sigma_token"), ".2e"),
    ("mismatch of engine and learner, sequence", _over_run("sigma_sequence"), ".2e"),
    ("gradient norm, mean", _over_run("grad_norm"), ".3f"),
    ("gradient norm, largest in the run", _worst("grad_norm"), ".2f"),
    (f"entropy, mean of the last {_LAST} steps", _at_end("entropy"), ".3f"),
)
_EXPERTS: tuple[Row, ...] = (
    ("bfloat16 engine against float32 learner, same weights: tokens", _changed("bfloat16", "tokens"), ".2%"),
    ("the same, over tokens and layers", _changed("bfloat16", "layers"), ".2%"),
    ("float32 engine against float32 learner, same weights: tokens", _changed("float32", "tokens"), ".2%"),
    ("learner before against after one step: tokens", _changed("one_step", "tokens"), ".2%"),
    ("the same, over tokens and layers", _changed("one_step", "layers"), ".2%"),
    ("share of the busiest expert of a layer (1/16 is balance)", lambda run: float(run["experts"]["busiest"]), ".2%"),
)


def _table(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    lines = []
    for label, read, style in rows:
        cells = []
        for algorithm in ALGORITHMS:
            found = [read(run) for run in runs if run["algorithm"] == algorithm]
            values = [value for value in found if value is not None]
            low, mean, high = (format(value, style) for value in (min(values), _mean(values), max(values)))
            cells.append(f"{mean} ({low} to {high})")
        lines.append([label, *cells])
    return table(["", *(algorithm.upper() for algorithm in ALGORITHMS)], lines)


def _clip_ratio(runs: Sequence[Run]) -> str:
    """How many times more tokens the first algorithm clips than the second, in words of one number."""
    shares = [
        _mean([_over_run("clipped_tokens")(run) for run in runs if run["algorithm"] == algorithm])
        for algorithm in ALGORITHMS
    ]
    return number(shares[0] / shares[1], 0) if shares[1] else "no token of the second was clipped"


def _draw(runs: Sequence[Run], path: Path) -> None:
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 5.4), dpi=_DPI, layout="constrained")
        panels = figure.subplots(2, 2).ravel()
        _curves(panels[0], runs, "reward_mean", "-")
        panels[0].set_title("reward, mean of a step", fontsize=9)
        _curves(panels[1], runs, "clipped_tokens", "-", floor=1e-5)
        panels[1].set_title("clipped share of tokens", fontsize=9)
        for name, line in (("token_log_ratio_std", "-"), ("log_ratio_std", "--")):
            _curves(panels[2], runs, name, line)
        panels[2].set_title("log-ratio, std: token (solid), sequence (dashed)", fontsize=9)
        for name, line in (("sigma_token", "-"), ("sigma_sequence", "--")):
            _curves(panels[3], runs, name, line)
        panels[3].set_title("engine against learner, std: token, sequence", fontsize=9)
        for panel in panels[1:]:
            panel.set_yscale("log")
        for panel in panels[2:]:
            panel.set_xlabel("step")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        figure.suptitle("What the ratio's kind does to a mixture of experts", x=0.015, ha="left", fontweight="bold")
        figure.savefig(path)


def _curves(panel: Any, runs: Sequence[Run], name: str, line: str, *, floor: float | None = None) -> None:
    """Every seed thin, and the mean of the seeds; values under `floor` are drawn at it."""
    for algorithm, colour in _COLOURS.items():
        mine = [np.array(run["series"][name], dtype=float) for run in runs if run["algorithm"] == algorithm]
        drawn = [values if floor is None else values.clip(min=floor) for values in mine]
        for values in drawn:
            panel.plot(range(1, len(values) + 1), values, color=colour, linestyle=line, linewidth=0.6, alpha=0.35)
        mean = np.mean(drawn, axis=0)
        panel.plot(range(1, len(mean) + 1), mean, color=colour, linestyle=line, linewidth=1.6, label=algorithm.upper())


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)
