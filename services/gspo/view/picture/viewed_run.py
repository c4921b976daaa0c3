"""A run as its page shows it: facts and curves, from a history that is read again when the log has changed."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from gspo.common.config.schema import Config
from gspo.common.telemetry.clip_causes import clip_causes_line, mismatch_line
from gspo.common.telemetry.step_time import shares
from gspo.runlog.run_history import RunHistory
from gspo.runlog.run_log import SUMMARY_NAME, EvaluationRecord, RunLog
from gspo.runlog.sentences.held_out import difference, error_of, in_words, stated_change
from gspo.view.picture.curves import Curve
from gspo.view.picture.plots import curves_of
from gspo.view.picture.summary import end_in_words, notes, run_findings, summarise
from gspo.view.picture.tables import config_keys, endings, evaluation_table, read_samples, what_ran

# Versions in the table of pushes, the newest first.
_PUSHES_SHOWN = 10
# None of their keys can hold a secret.
_SECTIONS = ("algorithm.", "sampling.", "staleness.")


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
        name: Its own among the viewed runs.
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

    def curves(self) -> list[Curve]:
        """The curves that the log has figures for."""
        return curves_of(self._history())

    def held_out(self) -> dict[str, tuple[EvaluationRecord, str]]:
        """The last evaluation of each held-out file, and a name for its prompts."""
        history = self._history()
        last = {file: records[-1] for file, records in history.by_file.items()}
        return {file: (record, history.held_out_prompts(record)) for file, record in last.items()}

    @property
    def headline_name(self) -> str:
        """The name of the first held-out file, also where the configuration has none for it."""
        return self._history().headline_name

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
    """The values of the template run.html, without services, and without `lost`, which reads all steps."""
    config, run_dir, phases = history.config, history.run_dir.resolve(), summary["wall_s"] or {}
    best = history.best[0] if history.best else None
    lines = [line(history.figures, config) for line in (clip_causes_line, mismatch_line)] if config else []
    files = " ".join(shlex.quote(str(path)) for path in config.evaluation.files.values()) if config else ""
    return {
        "summary": summary,
        "how_ended": end_in_words(summary),
        "results": [line for file, figures in summary["held_out"].items() for line in _results(file, figures)],
        "findings": run_findings(history),
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


def _results(file: str, figures: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The first and the last result of a held-out file with their errors and difference, sampled and greedy."""
    before, after = figures["before"], figures["after"] or {}
    for name, kind in (("sampled_mean", "mean over sampled answers"), ("greedy_mean", "greedy answers")):
        if name not in before:
            continue
        values = [in_words(of[name], error_of(of, name)) for of in (before, after) if name in of]
        change = difference(before, after, name)
        yield {
            "file": file,
            "kind": kind,
            "values": " \u2192 ".join(values),
            "versions": " to ".join(f"{of['version']:.0f}" for of in (before, after) if of),
            "change": stated_change(change) if change else "",
        }
