"""What a tracker is sent: every record of log/metrics.jsonl and log/evaluations.jsonl, once, under the names they have.

The files are the truth, so nothing is queued and nothing is lost: a tracker that was away goes on where it was. Step
figures become `train/NAME`, those of an evaluation `eval/NAME`, or `eval/FILE/NAME` where the files have names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gspo.common.config.schema import Config
from gspo.tracking.position import TrackerPosition

_FILES = {"metrics.jsonl": "train", "evaluations.jsonl": "eval"}
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
        self._log, self._tracker, self._position = run_dir / "log", tracker, position

    def send_new(self) -> int:
        """Send what came since the last call, steps before evaluations; returns how many records."""
        offsets, records = dict(self._position.offsets), list[TrackedRecord]()
        for name, section in _FILES.items():
            offsets[name], lines = _new_lines(self._log / name, offsets.get(name, 0))
            records += [_record(line, section) for line in lines]
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


def _new_lines(path: Path, offset: int) -> tuple[int, list[bytes]]:
    """The whole lines after `offset`, and where they end; one without an end is still being written."""
    if not path.exists():
        return offset, []
    with path.open("rb") as file:
        file.seek(offset)
        whole, end, _unfinished = file.read().rpartition(b"\n")
    return offset + len(whole) + len(end), whole.splitlines()


def _record(line: bytes, section: str) -> TrackedRecord:
    content: dict[str, Any] = json.loads(line)
    prefix = "/".join(part for part in (section, content.get("file", "")) if part)
    # What is not finite is null in the log, and no tracker can draw it.
    figures = {f"{prefix}/{name}": float(value) for name, value in content["figures"].items() if value is not None}
    return TrackedRecord(int(content["step"]), float(content["unix_s"]), figures)


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
