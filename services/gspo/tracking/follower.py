"""Sends every record of log/metrics.jsonl and log/evaluations.jsonl to a tracker, once.

The files are the only queue: a tracker that was away continues after its last record. Figures of steps become
`train/NAME`, figures of evaluations `eval/NAME`, or `eval/FILE/NAME` if the files have names. `finding/RULE` is 1 in a
step where a rule on learning has a finding, and 0 in later ones.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from gspo.common.config.schema import Config
from gspo.common.host.durable_write import replace_file
from gspo.common.telemetry.advice import findings
from gspo.common.telemetry.findings import RecentSteps
from gspo.runlog.run_log import EVALUATIONS, LOG_FOLDER, METRICS, EvaluationRecord, StepRecord, read_own_records

FigureRecord: TypeAlias = StepRecord | EvaluationRecord
_PARSERS: dict[str, Callable[[Mapping[str, Any]], FigureRecord]] = {
    METRICS: StepRecord.model_validate,
    EVALUATIONS: EvaluationRecord.model_validate,
}
_FOLDER = "tracking"
# Sections with addresses and files of this machine: a Redis address may hold a password.
_NOT_SENT = {"services", "tracking"}


@dataclass
class TrackerPosition:
    """The records that a tracker has: `tracking/NAME.json` in the run directory.

    Attributes:
        run_id: The tracker's id of the run, the same over all sessions.
        offsets: Sent bytes of each log file.
        num_sent: Number of sent records.
        last_step: Highest step among them.
    """

    path: Path
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    offsets: dict[str, int] = field(default_factory=dict)
    num_sent: int = 0
    last_step: int = -1

    @classmethod
    def read(cls, run_dir: Path, name: str) -> TrackerPosition:
        """The position of an earlier session of this tracker, or the beginning."""
        path = run_dir / _FOLDER / f"{name}.json"
        return cls(path, **json.loads(path.read_text())) if path.exists() else cls(path)

    def write(self) -> None:
        """Store the position; a reader sees the old content or the new one."""
        facts = {name: value for name, value in asdict(self).items() if name != "path"}
        replace_file(self.path, (json.dumps(facts) + "\n").encode())


class Tracker(Protocol):
    """A service or file format for figures."""

    def send(self, record: FigureRecord) -> None:
        """Send a record, whose figures have their names in a tracker."""

    def flush(self) -> None:
        """Return when all sent records are safe."""

    def close(self) -> None:
        """End the session."""


class Follower:
    """Sends a tracker the records that it does not have yet."""

    def __init__(self, run_dir: Path, config: Config, tracker: Tracker, position: TrackerPosition) -> None:
        self._log, self._tracker, self._position = run_dir / LOG_FOLDER, tracker, position
        self._config, self._recent = config, RecentSteps(config.evaluation.headline)
        # Rules that have had a finding.
        self._had: set[str] = set()
        for name, parse in _PARSERS.items():
            for record in read_own_records(self._log / name, parse).records:
                if record.step <= position.last_step:
                    self._judge(record)

    def send_new(self) -> int:
        """Send the records since the last call, steps before evaluations; returns their number."""
        offsets, records = dict(self._position.offsets), list[FigureRecord]()
        for name, parse in _PARSERS.items():
            new = read_own_records(self._log / name, parse, offset=offsets.get(name, 0))
            offsets[name] = new.end
            records += new.records
        if not records:
            return 0
        for record in records:
            prefix = "train" if isinstance(record, StepRecord) else "/".join(("eval", *filter(None, [record.file])))
            figures = {f"{prefix}/{name}": value for name, value in record.figures.items()}
            self._tracker.send(record.model_copy(update={"figures": figures | self._judge(record)}))
        self._tracker.flush()
        self._position.offsets = offsets
        self._position.num_sent += len(records)
        self._position.last_step = max(self._position.last_step, *(record.step for record in records))
        self._position.write()
        return len(records)

    def _judge(self, record: FigureRecord) -> dict[str, float]:
        """The findings at a step, as figures; none for an evaluation, which a later step shows."""
        if isinstance(record, EvaluationRecord):
            self._recent.add_evaluation(record.file, record.version, record.figures)
            return {}
        self._recent.add(record.step, record.figures)
        seen = findings(self._recent.judged(), self._config)
        self._had |= seen.keys()
        return {f"finding/{name}": float(name in seen) for name in sorted(self._had)}


def hyperparameters(config: Config) -> dict[str, str | int | float | bool]:
    """Every key that affects the training, as `section.key`."""
    return dict(_flat(config.model_dump(mode="json", exclude=_NOT_SENT), ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str | int | float | bool):
        yield name, value
    else:
        yield name, json.dumps(value)
