"""The plots of the page: time a step against its floor, what the services wait for, accuracy over steps and time.

No numbers are made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.harness.sizes import LENGTHS, Dtype, Lengths
from gspo.cli.report.panels import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, STYLE
from gspo.common.streams.keys import SERVICES

_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
_DPI = 150


def draw_steps(
    cases: Sequence[Mapping[str, Any]], floors: Mapping[tuple[Lengths, Dtype], tuple[float, float]], path: Path
) -> None:
    """Seconds a step of every case, beside the stacked floor of its length and arithmetic.

    Args:
        floors: (lengths, dtype) -> seconds of the engine alone and of the learner alone.
    """
    shown = list(dict.fromkeys((case["lengths"], case["dtype"]) for case in cases))
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.6), dpi=_DPI, layout="constrained")
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for panel, (lengths, dtype) in zip(panels, shown, strict=True):
            mine = [case for case in cases if (case["lengths"], case["dtype"]) == (lengths, dtype)]
            names = [f"lag {case['max_lag']}" for case in mine]
            if (lengths, dtype) in floors:
                engine_s, learner_s = floors[lengths, dtype]
                panel.bar("alone,\nadded", engine_s, color=SKY, label="vLLM alone")
                panel.bar("alone,\nadded", learner_s, bottom=engine_s, color=GREY, label="learner alone")
                panel.axhline(engine_s + learner_s, color=GREY, linestyle=":", linewidth=1)
            panel.bar(names, [case["seconds"] for case in mine], color=BLUE, label="whole system")
            panel.set_title(f"{lengths} answers, {dtype}", fontsize=9)
            panel.grid(visible=False, axis="x")
        panels[0].set_ylabel("seconds a step")
        _legend(figure, panels)
        _save(figure, "How near does a step come to its floor?", path)


def draw_waits(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Idle share of every service at every lag, in float32."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.2), dpi=_DPI, layout="constrained")
        panels = figure.subplots(1, len(LENGTHS), sharey=True, squeeze=False)[0]
        for panel, lengths in zip(panels, LENGTHS, strict=True):
            mine = [case for case in cases if (case["lengths"], case["dtype"]) == (lengths, "float32")]
            for place, case in enumerate(mine):
                shares = [case["idle_share"].get(service, np.nan) for service in SERVICES]
                places = np.arange(len(SERVICES)) + (place - (len(mine) - 1) / 2) * 0.27
                panel.bar(places, shares, 0.25, color=_COLOURS[case["max_lag"]], label=f"max_lag {case['max_lag']}")
            panel.set_xticks(range(len(SERVICES)), SERVICES, fontsize=7.5)
            panel.set_title(f"{lengths} answers", fontsize=9)
            panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            panel.grid(visible=False, axis="x")
        panels[0].set_ylabel("share of the time")
        _legend(figure, panels)
        _save(figure, "Who waits for whom?", path)


def draw_learning(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Held-out accuracy of every case over steps, and over time."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.6), dpi=_DPI, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for panel, x, label in zip(panels, ("step", "seconds"), ("step", "seconds of training"), strict=True):
            for case in cases:
                points = case["curve"]
                panel.errorbar(
                    [point[x] for point in points],
                    [point["accuracy"] for point in points],
                    yerr=[point["stderr"] or 0.0 for point in points],
                    color=_COLOURS[case["max_lag"]],
                    linestyle="-" if case["old_logprobs"] == "inference" else "--",
                    marker="o" if case["old_logprobs"] == "inference" else "s",
                    markersize=3.5,
                    capsize=2,
                    label=f"max_lag {case['max_lag']}, {case['old_logprobs']}",
                )
            panel.set_xlabel(label)
        panels[0].set_ylabel("held-out accuracy, sampled")
        _legend(figure, panels)
        _save(figure, "What does lag cost, and what does it buy?", path)


def draw_memory(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Memory of every service over the rollouts of the longest pipeline run."""
    case = max((case for case in cases if case["what"] == "pipeline"), key=lambda case: case["rollouts"])
    done = np.array(case["memory"]["steps"]) * case["step_rollouts"]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.4), dpi=_DPI, layout="constrained")
        panel = figure.subplots()
        for (name, mib), colour in zip(case["memory"]["mib"].items(), _COLOURS, strict=False):
            panel.plot(done[-len(mib) :], mib, color=colour, label=name, linewidth=1.4)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("rollouts trained on")
        panel.set_ylabel("resident memory, MiB")
        _legend(figure, [panel])
        _save(figure, "Does memory stay where it is?", path)


def _legend(figure: Any, panels: Sequence[Any]) -> None:
    """One legend for all panels, below them: from the panel that has the most to explain."""
    handles, labels = max((panel.get_legend_handles_labels() for panel in panels), key=lambda found: len(found[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _save(figure: Any, question: str, path: Path) -> None:
    figure.suptitle(question, x=0.015, horizontalalignment="left", fontsize=11.5, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
