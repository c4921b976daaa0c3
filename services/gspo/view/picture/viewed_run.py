"""A run as its page shows it: facts and curves, from a history that is read again when the log has changed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from gspo.common.config.schema import Config
from gspo.common.telemetry.step_time import shares
from gspo.runlog.run_history import SETTLEMENTS, RunHistory
from gspo.runlog.run_log import SUMMARY_NAME
from gspo.view.picture.page import earlier_summary
from gspo.view.picture.panels import Layer, Panel
from gspo.view.picture.plots import PLOTS, Plot
from gspo.view.picture.summary import advised, end_in_words, notes, summarise

# The curves of the page, by the names of the report's plots.
CURVES = (
    "reward", "length", "clip", "clip_causes", "log_ratio", "entropy",
    "gradient", "spread", "age", "time", "turns", "teacher",
)  # fmt: skip
# Versions in the table of pushes, the newest first.
_PUSHES_SHOWN = 10
_HELD_OUT = {"sampled_mean": ("sampled", "#0072B2"), "greedy_mean": ("greedy", "#D55E00")}
_FOLLOWED = ("metrics.jsonl", "evaluations.jsonl", "versions.jsonl")


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
        self._read: tuple[str, RunHistory] | None = None

    def state(self) -> str:
        """Another text after each change of the log."""
        names = (*(f"log/{name}" for name in _FOLLOWED), SUMMARY_NAME)
        return " ".join(str(_size(self.run_dir / name)) for name in names)

    def facts(self) -> dict[str, Any]:
        """The values of the template run.html."""
        history = self._history()
        earlier = earlier_summary(self.run_dir / SUMMARY_NAME, history)
        finished = {"end": earlier.get("end"), "reason": earlier.get("end_reason")}
        summary = summarise(history, earlier.get("wall_s"), finished)
        return {
            "summary": summary,
            "end_in_words": end_in_words(summary)[1],
            "advice": advised(history),
            "notes": notes(history, summary),
            "times": [(share.in_words, share.seconds, share.share) for share in shares(*history.figures)],
            "ledger": history.ledger,
            "pushes": history.pushes[: -_PUSHES_SHOWN - 1 : -1],
            "num_failed_pushes": sum(record.failures for record in history.pushes),
            "services": self._services(self.run_dir, history.config) if self._services else None,
            "endings": [(name, summary["groups"][name]) for name in (*SETTLEMENTS, "open")],
        }

    def curves(self) -> list[dict[str, Any]]:
        """The curves that the log has figures for: a name, a question, how to read it, steps, and lines over them."""
        history = self._history()
        by_name = {plot.name: plot for plot in PLOTS}
        return [curve for name in CURVES if (curve := _curve(by_name[name], history))["lines"]]

    def keys(self) -> dict[str, str]:
        """Every key of the configuration with its value as text; empty if it cannot be read."""
        config = self._history().config
        return dict(_flat("", config.model_dump(mode="json"))) if config else {}

    def _history(self) -> RunHistory:
        with self._lock:
            state = self.state()
            if self._read is None or self._read[0] != state:
                self._read = state, RunHistory(self.run_dir)
            return self._read[1]


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """(key, value) of nested sections; a list is one value."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else name, item)
    else:
        yield prefix, "null" if value is None else json.dumps(value, ensure_ascii=False)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


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
