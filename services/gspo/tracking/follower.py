"""What a tracker is sent: every record of log/metrics.jsonl and log/evaluations.jsonl, once, under the names they have.

The files are the truth, so nothing is queued and nothing is lost: a tracker that was away goes on where it was. Step
figures become `train/NAME`, those of an evaluation `eval/NAME`, or `eval/FILE/NAME` where the files have names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gspo.common.config.schema import Config
from gspo.runlog.records import read_own_records
from gspo.runlog.run_log import EVALUATIONS, LOG_FOLDER, METRICS, EvaluationRecord, StepRecord
from gspo.tracking.position import TrackerPosition

_PARSERS: dict[str, Callable[[Mapping[str, Any]], StepRecord | EvaluationRecord]] = {
    METRICS: StepRecord.parse,
    EVALUATIONS: EvaluationRecord.parse,
}
# Addresses and files of this machine: a Redis address may hold a password.
_NOT_SENT = {"services", "tracking"}


@dataclass(frozen=True)
class TrackedRecord:
    """The figures of one step or evaluation, with the names that a tracker shows."""

    step: int
    unix_s: float
    figures: dict[str, float]


class Tracker(Protocol):
    """Where figures are sent."""

    def send(self, record: TrackedRecord) -> None:
        """Take a record."""

    def flush(self) -> None:
        """Return when all that was sent is safe."""

    def close(self) -> None:
        """End the session."""


class Follower:
    """Sends a tracker what is recorded and was not sent yet."""

    def __init__(self, run_dir: Path, tracker: Tracker, position: TrackerPosition) -> None:
        self._log, self._tracker, self._position = run_dir / LOG_FOLDER, tracker, position

    def send_new(self) -> int:
        """Send what came since the last call, steps before evaluations; returns how many records."""
        offsets, records = dict(self._position.offsets), list[TrackedRecord]()
        for name, parse in _PARSERS.items():
            new = read_own_records(self._log / name, parse, offset=offsets.get(name, 0))
            offsets[name] = new.end
            records += [_tracked(record) for record in new.records]
        if not records:
            return 0
        for record in records:
            self._tracker.send(record)
        self._tracker.flush()
        self._position.offsets = offsets
        self._position.num_sent += len(records)
        self._position.last_step = max(self._position.last_step, *(record.step for record in records))
        self._position.write()
        return len(records)


def _tracked(record: StepRecord | EvaluationRecord) -> TrackedRecord:
    prefix = "train" if isinstance(record, StepRecord) else "/".join(("eval", *filter(None, [record.file])))
    figures = {f"{prefix}/{name}": value for name, value in record.figures.items()}
    return TrackedRecord(record.step, record.unix_s, figures)


def hyperparameters(config: Config) -> dict[str, str | int | float | bool]:
    """Every key that decides what is trained, as `section.key`."""
    return dict(_flat(config.model_dump(mode="json", exclude=_NOT_SENT), ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str | int | float | bool):
        yield name, value
    else:
        yield name, json.dumps(value)
