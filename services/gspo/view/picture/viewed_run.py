"""A run as its page shows it: facts and curves, from a history that is read again when the log has changed."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from gspo.common.config.schema import Config
from gspo.common.telemetry.clip_causes import clip_causes_line, mismatch_line
from gspo.common.telemetry.step_time import shares
from gspo.runlog.run_history import RunHistory
from gspo.runlog.run_log import SUMMARY_NAME, RunLog
from gspo.view.picture.panels import Layer, Panel
from gspo.view.picture.plots import PLOTS, Plot
from gspo.view.picture.summary import advised, difference, end_in_words, notes, summarise
from gspo.view.picture.tables import config_keys, endings, evaluation_table, read_samples, stale_by_length, what_ran

# The curves of the page, by the names of the report's plots.
CURVES = (
    "reward", "length", "clip", "clip_causes", "log_ratio", "entropy",
    "gradient", "spread", "age", "time", "turns", "teacher",
)  # fmt: skip
# Versions in the table of pushes, the newest first.
_PUSHES_SHOWN = 10
# None of their keys can hold a secret.
_SECTIONS = ("algorithm.", "sampling.", "staleness.")


_HELD_OUT = {"sampled_mean": ("sampled", "#0072B2"), "greedy_mean": ("greedy", "#D55E00")}


@dataclass(frozen=True)
class ServiceState:
    """A service.

    Attributes:
        when: The duration of the activity, or the time of the record.
        activity: Or the last record of the log.
    """

    name: str
    when: str
    activity: str


@dataclass(frozen=True)
class ServiceStates:
    """The services of a run.

    Attributes:
        source: A sentence that says where the states come from.
        lines: Further facts of the heartbeats, as in `gspo status`.
    """

    source: str
    states: list[ServiceState]
    lines: list[str]


class ViewedRun:
    """A run of the page. Any thread may ask.

    Args:
        name: Of its own among the viewed runs.
        services: Asks for the state of the run's services; None leaves them out.
    """

    def __init__(
        self, name: str, run_dir: Path, services: Callable[[Path, Config | None], ServiceStates] | None = None
    ) -> None:
        self.name, self.run_dir = name, run_dir
        self._services, self._lock = services, Lock()
        self._read: tuple[tuple[int, ...], RunHistory] | None = None

    def state(self) -> tuple[int, ...]:
        """Another value after each change of the log, and after the end of the run."""
        summary = self.run_dir / SUMMARY_NAME
        return (*RunLog(self.run_dir).sizes(), summary.stat().st_mtime_ns if summary.exists() else 0)

    def facts(self) -> dict[str, Any]:
        """The values of the template run.html."""
        history = self._history()
        services = self._services(self.run_dir, history.config) if self._services else None
        return {**run_facts(history, summarise(history)), "services": services}

    def curves(self) -> list[dict[str, Any]]:
        """The curves that the log has figures for: a name, a question, how to read it, steps, and lines over them."""
        return curves_of(self._history())

    def keys(self) -> dict[str, str]:
        """Every key of the configuration with its value as text; empty if it cannot be read."""
        return config_keys(self._history().config)

    def _history(self) -> RunHistory:
        with self._lock:
            state = self.state()
            if self._read is None or self._read[0] != state:
                self._read = state, RunHistory(self.run_dir)
            return self._read[1]


def run_facts(history: RunHistory, summary: dict[str, Any]) -> dict[str, Any]:
    """The values of the template run.html, without the states of services."""
    config, run_dir, phases = history.config, history.run_dir.resolve(), summary["wall_s"] or {}
    best = history.best[0] if history.best else None
    lines = [line(history.figures, config) for line in (clip_causes_line, mismatch_line)] if config else []
    files = " ".join(shlex.quote(str(path)) for path in config.evaluation.files.values()) if config else ""
    return {
        "summary": summary,
        "how_ended": end_in_words(summary),
        "change": difference(summary, "accuracy"),
        "advice": advised(history),
        "notes": notes(history, summary),
        "clip_lines": [line for line in lines if line],
        "held_out": {file: evaluation_table(records, best) for file, records in history.by_file.items()},
        "times": [(share.in_words, share.seconds, share.share) for share in shares(*history.figures)],
        "phases": [(name.replace("_", " "), s, s / sum(phases.values())) for name, s in phases.items() if s > 0],
        "ledger": history.ledger,
        "pushes": history.pushes[: -_PUSHES_SHOWN - 1 : -1],
        "num_failed_pushes": sum(record.failures for record in history.pushes),
        "services": None,
        "endings": endings(history),
        "lost": stale_by_length(history),
        "ran": what_ran(config) if config else {},
        "keys": {key: value for key, value in config_keys(config).items() if key.startswith(_SECTIONS)},
        "samples": read_samples(history),
        "environment": history.environment,
        "run_dir": run_dir,
        "quoted": shlex.quote(str(run_dir)),
        "has_export": (run_dir / "export" / "config.json").is_file(),
        "has_best": (run_dir / "best" / "config.json").is_file(),
        "evaluation": files if history.evaluations and files else "PROMPTS.jsonl",
    }


def curves_of(history: RunHistory) -> list[dict[str, Any]]:
    """The curves of a history, in the order of CURVES."""
    by_name = {plot.name: plot for plot in PLOTS}
    return [curve for name in CURVES if (curve := _curve(by_name[name], history))["lines"]]


def _curve(plot: Plot, history: RunHistory) -> dict[str, Any]:
    panel = plot.panels[0]
    lines = list(_lines(panel, history))
    steps = history.steps.tolist()
    if plot.name == "reward":
        versions = sorted({record.version for record in history.headline})
        steps = sorted({*steps, *versions})
        lines = [*_over(steps, history.steps.tolist(), lines), *_held_out_lines(steps, history)]
    return {
        "name": plot.name,
        "question": plot.question,
        "reading": plot.reading,
        "label": panel.label,
        "is_share": panel.is_share,
        "steps": steps,
        "lines": lines,
    }


def _lines(panel: Panel, history: RunHistory) -> Iterator[dict[str, Any]]:
    for part in panel.parts:
        values = history.series(part.figure)
        if np.isnan(values).all() or (isinstance(part, Layer) and not np.nansum(values)):
            continue
        label, style = part.label or part.figure.replace("_", " "), "-" if isinstance(part, Layer) else part.style
        yield _line(label, part.figure, part.colour, values.tolist(), is_dashed=style != "-")


def _line(label: str, figure: str, colour: str, values: Sequence[float | None], *, is_dashed: bool) -> dict[str, Any]:
    # JSON has no numbers beyond the finite ones.
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    return {"label": label, "figure": figure, "colour": colour, "values": finite, "is_dashed": is_dashed}


def _over(steps: list[int], trained: list[int], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same lines over more steps."""
    return [
        line | {"values": [dict(zip(trained, line["values"], strict=True)).get(step) for step in steps]}
        for line in lines
    ]


def _held_out_lines(steps: list[int], history: RunHistory) -> Iterator[dict[str, Any]]:
    for figure, (words, colour) in _HELD_OUT.items():
        values = {record.version: record.figures.get(figure) for record in history.headline}
        if any(value is not None for value in values.values()):
            yield _line(
                f"held-out prompts, {words}", figure, colour, [values.get(step) for step in steps], is_dashed=False
            )
