"""The log of one run as typed records: steps, evaluations, policy versions, settled groups.

A reader takes the log as it is: missing, growing, or with lines that it cannot read, which `problems` counts. A last
line without a line feed does not count: its writer was killed, or has not finished it.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

from gspo.common.telemetry.figure_names import present_name
from gspo.common.telemetry.findings import Finding
from gspo.runlog.checkpoint_files import whole_checkpoints
from gspo.runlog.checks import CHECKS, READ_CHECK
from gspo.runlog.data_files import DATA_FILES, DataFilesRecord
from gspo.runlog.left_out import LEFT_OUT, LeftOutRecord, why_not_left_out
from gspo.runlog.memory_shortages import MemoryShortage, shortage_files
from gspo.runlog.pushes import PUSHES, PushRecord, by_version
from gspo.runlog.step_files import step_files
from gspo.runlog.token_ledger import LEDGER, LedgerRecord, TokenLedger, token_ledger

Record = TypeVar("Record")
LOG_FOLDER = "log"
# Of a run directory: the report, and its summary for programs.
SUMMARY_NAME, PAGE_NAME = "summary.json", "report.html"
# A run directory's copy of algorithm.loss.path.
LOSS_NAME = "loss.py"
METRICS, EVALUATIONS, VERSIONS = "metrics.jsonl", "evaluations.jsonl", "policy.jsonl"
SETTLED, NOT_APPLIED = "settled.jsonl", "not_applied.jsonl"
# Settlements: of a group that was open at the end of the run, and of such a one when the run continues.
UNUSED, REOPENED = "unused", "reopened"
# In a replay's folder: the policy versions of its run.
REPLAYED_VERSIONS = "recorded.jsonl"


@dataclass(frozen=True)
class Records(Generic[Record]):
    """The records of one file.

    Attributes:
        records: In the order of the file.
        end: Byte after the last whole line, where the next read begins.
        broken: Line number -> error, of the lines that hold no record; lines count from 1 at the first byte read.
    """

    records: list[Record] = field(default_factory=list)
    end: int = 0
    broken: dict[int, str] = field(default_factory=dict)


def read_records(path: Path, parse: Callable[[Mapping[str, Any]], Record], *, offset: int = 0) -> Records[Record]:
    """Read the whole lines of a file; a missing file is an empty one.

    Args:
        parse: Makes the record of a line's JSON object; what it raises makes the line a broken one.
        offset: `end` of an earlier read.
    """
    if not path.exists():
        return Records(end=offset)
    with path.open("rb") as file:
        file.seek(offset)
        whole, line_feed, _unfinished = file.read().rpartition(b"\n")
    result = Records[Record](end=offset + len(whole) + len(line_feed))
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            result.records.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            result.broken[number] = f"{type(error).__name__}: {error}"
    return result


def read_own_records(path: Path, parse: Callable[[Mapping[str, Any]], Record], *, offset: int = 0) -> Records[Record]:
    """Read a file in which no line may be broken.

    Raises:
        ValueError: Something else than the learner wrote into the file.
    """
    result = read_records(path, parse, offset=offset)
    for number, error in result.broken.items():
        start = f" after byte {offset}" if offset else ""
        raise ValueError(f"{path}, line {number}{start}: not a line that the learner wrote ({error})")
    return result


def _finite(figures: Any) -> Any:
    """Strict JSON has no NaN: the log has null instead."""
    return {present_name(name): value for name, value in dict(figures).items() if value is not None}


Figures = Annotated[dict[str, float], BeforeValidator(_finite)]


class LogLine(BaseModel):
    """A record of the log: `model_validate` makes it of a line's JSON object."""

    model_config = ConfigDict(frozen=True)


class StepRecord(LogLine):
    """A trained step: a line of metrics.jsonl. `figures` lacks those that were not finite."""

    step: int
    version: int
    unix_s: float
    figures: Figures


class EvaluationRecord(LogLine):
    """An evaluation of a policy version on one held-out file: a line of evaluations.jsonl.

    Attributes:
        file: Name of the held-out file; empty where it has none.
        score: What evaluation.keep_best compares of this file; None where it compares nothing.
        figures: Without those that were not finite.
    """

    file: str = ""
    version: int
    step: int
    unix_s: float
    score: float | None = None
    figures: Figures

    @property
    def largest_pass(self) -> int:
        """The largest k for which there is a pass@k; 0 without any."""
        suffixes = (name.removeprefix("pass_at_") for name in self.figures if name.startswith("pass_at_"))
        return max((int(k) for k in suffixes if k.isdecimal()), default=0)

    @property
    def line(self) -> str:
        """The main figures with their standard errors in one line; empty where nothing was scored."""
        figures = self.figures
        shown = [(name, name, f"{name}_mean") for name in ("sampled", "greedy")]
        if (largest := self.largest_pass) > 1:
            shown.append((f"pass@{largest}", f"pass_at_{largest}", f"pass_at_{largest}"))
        return ", ".join(
            f"{label} {figures[figure]:.3f}" + (f" \u00b1 {error:.3f}" if error is not None else "")
            for label, stem, figure in shown
            if figure in figures
            for error in [figures.get(f"{stem}_stderr")]
        )


class VersionRecord(LogLine):
    """A policy version: a line of policy.jsonl.

    Attributes:
        dtype: That of the digested weights.
    """

    version: int
    step: int
    digest: str
    dtype: str = ""


class SettledRecord(LogLine):
    """A group that ended, or came open again: a line of settled.jsonl.

    Attributes:
        settlement: How it ended. REOPENED takes back the line before: the end of the run had left the group over, and
            the run continues.
        response_tokens: Sampled tokens of each of its rollouts, where the group was too old.
        step: The step that trained it, or the last one that was logged before it ended otherwise.
        rewards_differ: Whether its counted rewards differ; None where it failed or was never scored.
    """

    group: int
    settlement: str
    reason: str = ""
    response_tokens: tuple[int, ...] = ()
    step: int = 0
    rewards_differ: bool | None = None


class RunLog:
    """Reads the log of a run directory, afresh at each call."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / LOG_FOLDER
        self._num_broken: dict[str, int] = {}

    @property
    def problems(self) -> list[str]:
        """A sentence on each file in which the last read met lines that are no records."""
        return [
            f"{name}: {count} line(s) are not the learner's, and are left out"
            for name, count in self._num_broken.items()
            if count
        ]

    def steps(self) -> list[StepRecord]:
        """The trained steps in order; the last record of a step counts."""
        steps = {record.step: record for record in self._read(METRICS, StepRecord.model_validate)}
        return [steps[step] for step in sorted(steps)]

    def evaluations(self) -> list[EvaluationRecord]:
        """The evaluations by policy version, those of one version in the order of the file."""
        return sorted(self._read(EVALUATIONS, EvaluationRecord.model_validate), key=lambda record: record.version)

    def versions(self) -> list[VersionRecord]:
        """The policy versions in order; the last record of a version counts."""
        versions = {record.version: record for record in self._read(VERSIONS, VersionRecord.model_validate)}
        return [versions[version] for version in sorted(versions)]

    def settled(self) -> list[SettledRecord]:
        """The groups that ended, in the order of the file: trained ones only where their step file was removed."""
        return in_effect(self._read(SETTLED, SettledRecord.model_validate))

    def ledger(self) -> TokenLedger | None:
        """The token ledger by its last records; None without a record."""
        return token_ledger(self._read(LEDGER, LedgerRecord.model_validate))

    def checks(self) -> list[Finding]:
        """The findings of the newest start about its prompts."""
        return self._read(CHECKS, READ_CHECK)

    def pushes(self) -> list[PushRecord]:
        """The pushes of each policy version, in order."""
        return by_version(self._read(PUSHES, PushRecord.model_validate))

    def shortages(self) -> list[MemoryShortage]:
        """The steps that ran out of memory, each time, in order."""
        files = [self._read(path.name, MemoryShortage.model_validate) for path in shortage_files(self.folder)]
        return sorted((record for records in files for record in records), key=lambda record: record.unix_s)

    def data_files(self) -> list[DataFilesRecord]:
        """The starts that saw other contents of the data files than the one before, in order."""
        return read_records(self.folder.parent / DATA_FILES, DataFilesRecord.model_validate).records

    def left_out(self) -> list[int]:
        """The steps that are left out of training, in order."""
        return sorted({record.step for record in self._read(LEFT_OUT, LeftOutRecord.model_validate)})

    def why_not_left_out(self, step: int) -> str:
        """Why a step cannot be left out; empty where it can, or is already."""
        if step in self.left_out():
            return ""
        return why_not_left_out(
            step,
            logged=self.step_files(),
            versions={record.version for record in self.versions()},
            checkpoint=max(whole_checkpoints(self.folder.parent), default=0),
        )

    def untrained_step(self) -> int | None:
        """The first logged step that a resume would train; None where there is none."""
        left_out = self.left_out()
        return next((s for s in self.step_files() if s not in left_out and not self.why_not_left_out(s)), None)

    def step_files(self) -> dict[int, Path]:
        """The files of the logged steps by step, in order."""
        return step_files(self.folder)

    def has_trained(self) -> bool:
        """Whether the run directory holds a logged step or a checkpoint."""
        return bool(self.step_files()) or any(self.folder.parent.glob("checkpoints/step-*"))

    def sizes(self) -> tuple[int, ...]:
        """Bytes of the files that grow when a step, a version or an evaluation is recorded."""
        files = [self.folder / name for name in (METRICS, VERSIONS, EVALUATIONS, LEDGER)]
        return tuple(file.stat().st_size if file.exists() else 0 for file in files)

    def _read(self, name: str, parse: Callable[[Mapping[str, Any]], Record]) -> list[Record]:
        result = read_records(self.folder / name, parse)
        self._num_broken[name] = len(result.broken)
        return result.records


def in_effect(records: Iterable[SettledRecord]) -> list[SettledRecord]:
    """The records without those that a later one takes back."""
    kept: list[SettledRecord | None] = []
    unused: dict[int, int] = {}
    for record in records:
        if record.settlement == REOPENED:
            if (place := unused.pop(record.group, None)) is not None:
                kept[place] = None
            continue
        if record.settlement == UNUSED:
            unused[record.group] = len(kept)
        kept.append(record)
    return [record for record in kept if record is not None]


def best_evaluated(
    evaluations: Iterable[EvaluationRecord], weights: Mapping[str, float] | None
) -> tuple[int, float] | None:
    """The best version of recorded evaluations and its score; arguments as in `version_scores`."""
    records = ((record.version, record.file, record.score) for record in evaluations)
    return best_of(version_scores(records, weights))


def best_of(scores: Mapping[int, float]) -> tuple[int, float] | None:
    """The best version and its score; None where no version has a score.

    Args:
        scores: Score of each policy version. With equal scores the earliest version is the best.
    """
    return max(scores.items(), key=lambda item: (item[1], -item[0]), default=None)


def version_scores(
    records: Iterable[tuple[int, str, float | None]], weights: Mapping[str, float] | None
) -> dict[int, float]:
    """The score of each policy version: the mean of its files' scores by their weights; none where one is missing.

    Args:
        records: (policy version, file, score) of evaluations in the order of recording. The first score of a version on
            a file counts.
        weights: File -> weight; None where they are not known: then every file with a score counts once.
    """
    first: dict[int, dict[str, float]] = {}
    for version, file, score in records:
        if score is not None:
            first.setdefault(version, {}).setdefault(file, score)
    known = weights or dict.fromkeys((file for of_file in first.values() for file in of_file), 1.0)
    total = math.fsum(known.values())
    return {
        version: math.fsum(weight * of_file[file] for file, weight in known.items()) / total
        for version, of_file in first.items()
        if known.keys() <= of_file.keys()
    }
