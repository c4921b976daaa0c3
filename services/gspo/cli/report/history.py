"""What a run directory says about its run, read for the report: figures, evaluations, versions, endings, counts.

It changes nothing, and takes a run as it finds it: killed in the middle, without a step, with files missing; what it
could not read is in `problems`.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gspo.cli.rundir.plan import ENVIRONMENT_NAME
from gspo.common.config.loading import read_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.service.app import CONFIG_NAME

TRAINED = "trained"
SETTLEMENTS = (TRAINED, "filtered", "stale", "failed", "unused")
SKIPS = ("failed", "truncated", "stale")
_STEP_FILE = re.compile(r"step-(\d{6,})\.parquet")


@dataclass
class Groups:
    """How the groups ended, by the step files and settled.jsonl.

    Group ids count from 0 without a gap, so the highest one says how many were issued at least; those that were
    issued after it and have not ended are known to Redis alone.

    Attributes:
        counts: All five settlements.
        reasons: Of those that were not trained, by settlement.
        twice: Groups that ended more than once, which must not be.
        dropped_lengths: Sampled tokens of each rollout of the groups that were too old.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reasons: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    twice: list[int] = field(default_factory=list)
    dropped_lengths: list[int] = field(default_factory=list)
    _ended: dict[int, str] = field(default_factory=dict)

    def add(self, group: int, settlement: str, reason: str = "") -> None:
        """Count an ending."""
        if group in self._ended:
            self.twice.append(group)
        self._ended[group] = settlement
        self.counts[settlement] += 1
        if reason:
            self.reasons[settlement][reason] += 1

    @property
    def issued(self) -> int:
        """Groups issued, as far as the log knows."""
        return max(self._ended, default=-1) + 1

    @property
    def open(self) -> int:
        """Groups issued that have not ended, as far as the log knows."""
        return self.issued - len(self._ended)


@dataclass(frozen=True)
class RunHistory:
    """One run as its directory tells it.

    Attributes:
        config: None where it cannot be read.
        metrics: A record a trained step, in order.
        evaluations: A record each, by policy version, of every held-out file.
        versions: The newest record of each policy version, in order.
        step_files: Logged steps that are still on the disk, in order.
        rollouts: By step, how many were trained and skipped.
        problems: What could not be read, for the reader of the report.
    """

    run_dir: Path
    config: Config | None
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    versions: list[dict[str, Any]]
    step_files: dict[int, Path]
    rollouts: dict[int, Counter[str]]
    groups: Groups
    problems: list[str]

    @property
    def name(self) -> str:
        """The run's."""
        return self.config.name if self.config else self.run_dir.name

    @property
    def version(self) -> int:
        """The newest policy version; 0, the given model, where none is recorded."""
        return int(self.versions[-1]["version"]) if self.versions else self.step

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return max((int(record["step"]) for record in (*self.versions[-1:], *self.metrics[-1:])), default=0)

    @cached_property
    def held_out(self) -> dict[str, list[dict[str, Any]]]:
        """The evaluations of each held-out file, in the user's order; the first is the headline's."""
        names = dict.fromkeys([*(self.config.evaluation.files if self.config else ()), *map(file_of, self.evaluations)])
        found = {name: [record for record in self.evaluations if file_of(record) == name] for name in names}
        return {name: records for name, records in found.items() if records}

    @property
    def headline(self) -> list[dict[str, Any]]:
        """The evaluations of the first held-out file."""
        return next(iter(self.held_out.values()), [])

    @cached_property
    def best(self) -> tuple[int, float] | None:
        """(version, score) of the best version by evaluation.keep_best; a version's first score counts."""
        scores: dict[int, float] = {}
        for record in self.evaluations:
            if record.get("score") is not None:
                scores.setdefault(int(record["version"]), float(record["score"]))
        return max(scores.items(), key=lambda item: (item[1], -item[0]), default=None)

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """The steps that have figures."""
        return np.array([record["step"] for record in self.metrics], dtype=np.int64)

    @cached_property
    def figures(self) -> list[dict[str, float]]:
        """The figures of every step; those without a finite value are left out."""
        return [known(record["figures"]) for record in self.metrics]

    def series(self, name: str) -> NDArray[np.float64]:
        """A figure over `steps`; NaN where a step has none."""
        return np.array([figures.get(name, np.nan) for figures in self.figures], dtype=np.float64)


def file_of(record: dict[str, Any]) -> str:
    """The held-out file of an evaluation; empty where it has no name."""
    return str(record.get("file", ""))


def known(figures: dict[str, float | None]) -> dict[str, float]:
    """Without those that were not finite, which the log keeps as null."""
    return {name: value for name, value in figures.items() if value is not None}


def read_history(run_dir: Path) -> RunHistory:
    """Read everything but the rollouts themselves; nothing that is missing or broken is an error."""
    problems: list[str] = []
    log = run_dir / "log"
    step_files = _step_files(log)
    groups, rollouts = _count(step_files, log / "settled.jsonl", problems)
    metrics = _json_lines(log / "metrics.jsonl", ("step", "figures"), problems)
    evaluations = _json_lines(log / "evaluations.jsonl", ("version", "figures"), problems)
    versions = _json_lines(log / "policy.jsonl", ("version", "digest", "step"), problems)
    return RunHistory(
        run_dir=run_dir,
        config=_config(run_dir, problems),
        environment=_environment(run_dir / ENVIRONMENT_NAME, problems),
        metrics=_last_of_each(metrics, "step"),
        evaluations=sorted(evaluations, key=lambda record: int(record["version"])),
        versions=_last_of_each(versions, "version"),
        step_files=step_files,
        rollouts=rollouts,
        groups=groups,
        problems=problems,
    )


def read_columns(path: Path, columns: list[str], added: tuple[str, ...] = ()) -> Any:
    """Some columns of a step file, and those of `added` that it has, as a pyarrow Table.

    Raises:
        ValueError, OSError: It is not one.
    """
    with pq.ParquetFile(path) as file:
        there = set(file.schema_arrow.names)
        if missing := set(columns) - there:
            raise ValueError(f"has no column {', '.join(sorted(missing))}")
        return file.read(columns=[*columns, *(name for name in added if name in there)])


def _step_files(log: Path) -> dict[int, Path]:
    if not log.is_dir():
        return {}
    found = {int(match[1]): file for file in log.iterdir() if (match := _STEP_FILE.fullmatch(file.name))}
    return dict(sorted(found.items()))


def _count(step_files: dict[int, Path], settled: Path, problems: list[str]) -> tuple[Groups, dict[int, Counter[str]]]:
    groups, rollouts = Groups(), {}
    # A trained group has a line only where its step file was removed, or was about to be when a kill came.
    with_line = set()
    for record in _json_lines(settled, ("group", "settlement"), problems):
        if record["settlement"] == TRAINED:
            with_line.add(record["group"])
        groups.add(record["group"], record["settlement"], record.get("reason", ""))
        groups.dropped_lengths += record.get("response_tokens", [])
    for step, path in step_files.items():
        try:
            table = read_columns(path, ["group", "skipped"])
        except (OSError, ValueError, pa.ArrowException) as error:
            problems.append(f"{path.name} cannot be read, and its groups are not counted: {error}")
            continue
        rollouts[step] = Counter(reason or TRAINED for reason in table.column("skipped").to_pylist())
        for group in sorted(set(table.column("group").to_pylist()) - with_line):
            groups.add(group, TRAINED)
    return groups, rollouts


def _json_lines(path: Path, keys: tuple[str, ...], problems: list[str]) -> list[dict[str, Any]]:
    """The records that have `keys`; a last line without an end is one that a kill cut off, or that is being written."""
    if not path.exists():
        return []
    records, broken = [], 0
    whole, _, _unfinished = path.read_bytes().rpartition(b"\n")
    for line in whole.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and record.keys() >= set(keys):
            records.append(record)
        else:
            broken += 1
    if broken:
        problems.append(f"{path.name}: {broken} line(s) are not the learner's, and are left out")
    return records


def _last_of_each(records: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [record for _, record in sorted({int(record[key]): record for record in records}.items())]


def _config(run_dir: Path, problems: list[str]) -> Config | None:
    try:
        return read_config(run_dir / CONFIG_NAME)
    except InputError as error:
        problems.append(str(error))
        return None


def _environment(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
