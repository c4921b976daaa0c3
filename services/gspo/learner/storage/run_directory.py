"""The run directory in the hands of its one learner: locked, with an epoch for each start, the only truth of the run.

The command line checks whether it belongs to the configuration.
"""

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from gspo.common.errors import InputError
from gspo.common.host.durable_write import TEMPORARY, replace_file
from gspo.learner.assembly.rows import Row
from gspo.learner.assembly.settlements import EndedGroup, GroupEnding, Settlements
from gspo.learner.storage.checkpoints import Checkpoints
from gspo.learner.storage.durable_files import DiskSpace, JsonLines, finite_or_null
from gspo.learner.storage.group_results import GroupResults, rewards_differ
from gspo.learner.storage.left_out_steps import LeftOutSteps
from gspo.learner.storage.step_log import StepLog
from gspo.runlog.left_out import LEFT_OUT
from gspo.runlog.pushes import PUSHES, PushRecord
from gspo.runlog.run_log import (
    EVALUATIONS,
    LOG_FOLDER,
    METRICS,
    NOT_APPLIED,
    REOPENED,
    SETTLED,
    VERSIONS,
    EvaluationRecord,
    RunLog,
    SettledRecord,
    StepRecord,
    VersionRecord,
    in_effect,
    version_scores,
)
from gspo.runlog.token_ledger import LEDGER, LedgerRecord
from gspo_proto.rollout_pb2 import EvaluationDone


class PolicyVersion(VersionRecord):
    """A version of the policy as a replay needs it. (version, digest) identifies it everywhere.

    Attributes:
        hyperparameters: Its step's, by the names of Hyperparameters; None for version 0.
    """

    dtype: str
    hyperparameters: dict[str, bool | int | float] | None


class RunDir:
    """The run directory, from opening to `close`.

    Opening locks it, raises the epoch, removes unfinished files, and reads how every group ended.

    Args:
        disk: Waits for free disk space at each write; opening does not wait.

    Attributes:
        steplog: The logged steps that are still there.
        checkpoints: The checkpoint folders.
        epoch: This start's, from 1.
        settlements: How groups have ended.
        results: Whether the rewards of these groups differed, in the order of the log.
        last_step: The last logged one; 0 before the first.
        versions: The newest record of each policy version.
        left_out: The steps that a replay passes over.
        evaluations: Label of each recorded evaluation -> its number of prompts, in the order of recording.
        shortages: The steps that ran out of memory before it was opened.
        trained_s: Seconds that the recorded steps took before it was opened.
        mismatch_step: The last of them that measured the mismatch with the engines.

    Raises:
        InputError: Another learner holds the directory, or it cannot be written.
        ValueError: The log holds a line that no learner wrote, or a group that ended twice.
    """

    def __init__(self, path: Path, disk: DiskSpace | None = None) -> None:
        self.path = path
        log_folder = path / LOG_FOLDER
        self.steplog = StepLog(log_folder, disk)
        self.checkpoints = Checkpoints(path / "checkpoints")
        _check_writable(path)
        for folder in (log_folder, self.checkpoints.folder):
            folder.mkdir(exist_ok=True)
        with ExitStack() as files:
            files.callback(os.close, _take_lock(path))
            self.epoch = _raise_epoch(path / "epoch")
            _remove_unfinished(log_folder, self.checkpoints.folder)
            names = (SETTLED, VERSIONS, METRICS, EVALUATIONS, NOT_APPLIED, LEFT_OUT, LEDGER, PUSHES)
            self._lines = {name: files.enter_context(JsonLines(log_folder / name, disk)) for name in names}
            # Trained groups whose step file was removed.
            self._trained_lines: set[int] = set()
            self.settlements, self.results = self._read_settlements()
            self.last_step = max(self.steplog.steps(), default=0)
            self.versions = {v.version: v for v in self._lines[VERSIONS].records(PolicyVersion.model_validate)}
            steps = self._lines[METRICS].records(StepRecord.model_validate)
            self._measured_steps = {record.step for record in steps}
            self.mismatch_step = max((step.step for step in steps if "sigma_token" in step.figures), default=None)
            self.trained_s = sum(record.figures.get("step_s", 0.0) for record in steps)
            self.shortages = RunLog(path).shortages()
            self.left_out = LeftOutSteps(self._lines[LEFT_OUT])
            self._not_applied = set(self._lines[NOT_APPLIED].records(lambda line: (line["step"], line["update"])))
            self.evaluations: dict[str, float] = {}
            self._scores: list[tuple[int, str, float | None]] = []
            evaluations = self._lines[EVALUATIONS].records(lambda line: (line["label"], EvaluationRecord(**line)))
            for label, record in evaluations:
                self._note_evaluation(label, record)
            self._open_files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file and let the lock go."""
        self._open_files.close()

    def write_step(self, step: int, rows: Sequence[Row]) -> None:
        """Log a step before it is trained; its groups are then settled as trained.

        Raises:
            FileExistsError: The step is logged already, and its file stays.
            ValueError: A row belongs to another step, or a group has ended before.
        """
        if self.steplog.path(step).exists():
            raise FileExistsError(f"{self.steplog.path(step)} is there: step {step} is logged already")
        groups = sorted({row.group for row in rows})
        if others := {row.step for row in rows} - {step}:
            raise ValueError(f"rows of step {sorted(others)} cannot be logged as step {step}")
        self._refuse_settled(groups)
        self.steplog.write(step, rows)
        self.last_step = step
        for group in groups:
            self.settlements.add(group, GroupEnding.TRAINED)
        self.results.add(rewards_differ((row.group, row.reward, row.skipped, row.advantage) for row in rows).items())

    def leave_out(self, step: int) -> None:
        """Leave a logged step out of training from now on, unless it is; on the disk when this returns.

        Raises:
            InputError: It is not logged, was applied, or lies before the last checkpoint.
        """
        if step in self.left_out:
            return
        if reason := RunLog(self.path).why_not_left_out(step):
            raise InputError("--leave-out", reason, "Resume without it")
        self.left_out.add(step, self.steplog.read(step))

    def last_rows(self) -> list[Row]:
        """The rows of the last logged step; none before the first."""
        return self.steplog.read(self.last_step) if self.last_step else []

    def append_pushes(self, records: Iterable[PushRecord]) -> None:
        """Record pushes of policy versions; on the disk when this returns."""
        self._lines[PUSHES].append(record.model_dump() for record in records)

    def append_ledger(self, record: LedgerRecord) -> None:
        """Record the token ledger of a moment; on the disk when this returns."""
        self._lines[LEDGER].append([record.model_dump()])

    def steps_to_replay(self, after: int) -> list[int]:
        """The logged steps after step `after`, in order.

        Raises:
            ValueError: One of them is missing.
        """
        steps = [step for step in self.steplog.steps() if step > after]
        if missing := set(range(after + 1, max(steps, default=after) + 1)) - set(steps):
            raise ValueError(
                f"{self.steplog.path(min(missing))} is missing: the log cannot be replayed from the state after "
                f"step {after}. Put the file back, or a checkpoint that is newer"
            )
        return steps

    def settle(self, groups: Sequence[EndedGroup]) -> None:
        """Record how groups ended that are not trained; on the disk when this returns.

        Raises:
            ValueError: One of them has ended before; nothing is written then.
        """
        self._refuse_settled([settled.group for settled in groups])
        self._append_settled((self.last_step, settled) for settled in groups)
        for settled in groups:
            self.settlements.add(settled.group, settled.settlement)
        self.results.add((settled.group, settled.rewards_differ) for settled in groups)

    def reopen_unused(self) -> None:
        """Take back the end of the groups that an earlier end of the run left over; on the disk when this returns.

        They were the last ones to end, so the result of no other group changes its place. Their prompts come next.
        """
        unused = [group for group, ending in self.settlements.items() if ending is GroupEnding.UNUSED]
        if not unused:
            return
        line = {"settlement": REOPENED, "reason": "the run continues", "step": self.last_step, "unix_s": time.time()}
        self._lines[SETTLED].append({"group": group, **line} for group in unused)
        self.settlements, self.results = self._read_settlements()

    def append_version(
        self, version: int, digest: str, dtype: str, hyperparameters: dict[str, bool | int | float] | None = None
    ) -> None:
        """Record a policy version, which the step of its number made; on the disk when this returns.

        A version that a replay made again is written only if its digest differs; then the newest digest counts.
        Recorded hyperparameters stay if the call brings none.
        """
        if (recorded := self.versions.get(version)) and recorded.digest == digest:
            return
        if hyperparameters is None and recorded:
            hyperparameters = recorded.hyperparameters
        record = PolicyVersion(
            version=version, step=version, digest=digest, dtype=dtype, hyperparameters=hyperparameters
        )
        self._lines[VERSIONS].append([{**record.model_dump(), "unix_s": time.time()}])
        self.versions[version] = record

    def append_not_applied(self, step: int, updates: Iterable[Mapping[str, Any]]) -> None:
        """Record the mini-batches of a step that were not applied, each once; on the disk when this returns.

        Args:
            updates: The fields of each UpdateNotApplied.
        """
        new = [record for record in updates if (step, record["update"]) not in self._not_applied]
        if new:
            self._lines[NOT_APPLIED].append({"step": step, **record, "unix_s": time.time()} for record in new)
            self._not_applied |= {(step, record["update"]) for record in new}

    def not_applied(self, step: int) -> list[int]:
        """The updates of a step that are recorded as not applied."""
        return sorted(update for of_step, update in self._not_applied if of_step == step)

    def append_metrics(self, step: int, figures: Mapping[str, float]) -> None:
        """Record a step's figures, unless they are: a replay trains it again."""
        if step in self._measured_steps:
            return
        record = {"step": step, "version": step, "unix_s": time.time(), "figures": finite_or_null(figures)}
        self._lines[METRICS].append([record])
        self._measured_steps.add(step)

    def append_evaluation(self, done: EvaluationDone) -> None:
        """Record an evaluation under its label, unless one of as many prompts is recorded."""
        label, figures, score = done.evaluation, done.figures, done.score if done.HasField("score") else None
        if label in self.evaluations and figures.get("num_prompts", 0.0) <= self.evaluations[label]:
            return
        record = {"label": label, "version": done.version, "step": done.step, "unix_s": time.time()}
        record |= {"file": done.file, "score": score, "figures": finite_or_null(figures)}
        self._lines[EVALUATIONS].append([record])
        self._note_evaluation(label, EvaluationRecord.model_validate(record))

    def scores(self, weights: Mapping[str, float]) -> dict[int, float]:
        """The score of each measured version in evaluation.keep_best, by the weights of the held-out files."""
        return version_scores(self._scores, weights)

    def prune(self, *, keep_checkpoints: int, keep_log_steps: int | None) -> None:
        """Remove checkpoints and step files beyond the numbers to keep.

        A step stays while the replay after any kept checkpoint needs it; all stay while there is no checkpoint.
        """
        whole = self.checkpoints.steps()
        for step in whole[:-keep_checkpoints]:
            self.checkpoints.remove(step)
        if keep_log_steps is None or not whole:
            return
        oldest_kept = whole[-keep_checkpoints:][0]
        self._remove_steps([step for step in self.steplog.steps()[:-keep_log_steps] if step <= oldest_kept])

    def _remove_steps(self, steps: Sequence[int]) -> None:
        """Remove step files; their groups are first recorded as trained, since no other file has them."""
        reason = "its step's file was removed under keep_log_steps"
        trained = [
            (step, EndedGroup(group, GroupEnding.TRAINED, reason, rewards_differ=differ))
            for step in steps
            for group, differ in self.steplog.results(step).items()
            if group not in self._trained_lines
        ]
        self._append_settled(trained)
        self._trained_lines.update(settled.group for _, settled in trained)
        self.steplog.remove(steps)

    def _append_settled(self, groups: Iterable[tuple[int, EndedGroup]]) -> None:
        """Add lines of groups, each with its step."""
        now = time.time()
        self._lines[SETTLED].append(
            {"group": s.group, "settlement": s.settlement.value, "reason": s.reason, "step": step, "unix_s": now}
            | ({"response_tokens": list(s.response_tokens)} if s.response_tokens else {})
            | ({"rewards_differ": s.rewards_differ} if s.rewards_differ is not None else {})
            for step, s in groups
        )

    def _refuse_settled(self, groups: Sequence[int]) -> None:
        for group in groups:
            if (ended := self.settlements.get(group)) is not None:
                raise ValueError(f"group {group} is settled already: '{ended}'")

    def _read_settlements(self) -> tuple[Settlements, GroupResults]:
        """How groups ended, and their results in the order in which they did: of each step first those it trained."""
        settlements, results = Settlements(), GroupResults()
        # By step; then 0 and the group's number for the trained ones, 1 and the order of the file for the others.
        ordered: list[tuple[tuple[int, int, int], int, bool | None]] = []
        for line, record in enumerate(in_effect(self._lines[SETTLED].records(SettledRecord.model_validate))):
            ending = GroupEnding(record.settlement)
            settlements.add(record.group, ending)
            is_trained = ending is GroupEnding.TRAINED
            place = (record.step, 0, record.group) if is_trained else (record.step, 1, line)
            ordered.append((place, record.group, record.rewards_differ))
        self._trained_lines.update(g for g, settlement in settlements.items() if settlement is GroupEnding.TRAINED)
        for step in self.steplog.steps():
            for group, differ in self.steplog.results(step).items():
                # After a kill between the line and the removal of the file there are both.
                if group not in self._trained_lines:
                    settlements.add(group, GroupEnding.TRAINED)
                    ordered.append(((step, 0, group), group, differ))
        results.add((group, differ) for _, group, differ in sorted(ordered, key=itemgetter(0)))
        return settlements, results

    def _note_evaluation(self, label: str, record: EvaluationRecord) -> None:
        self.evaluations[label] = record.figures.get("num_prompts", 0.0)
        self._scores.append((record.version, record.file, record.score))


def _take_lock(path: Path) -> int:
    """The descriptor of the locked file; the system unlocks it with the end of the process."""
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 4096).decode(errors="replace") or "a learner that is just starting"
        os.close(descriptor)
        raise InputError(
            str(path), f"one learner at a time, and {holder} has locked it", "Let that run end, or stop it"
        ) from None
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"pid {os.getpid()} on host {socket.gethostname()}".encode())
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_writable(path: Path) -> None:
    probe = path / f"writable{TEMPORARY}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            "run.directory",
            f"{path} cannot be written by user {os.getuid()} ({error.strerror})",
            f"Give it to that user (chown -R {os.getuid()}), mount it writable, or free space on its disk",
        ) from error


def _raise_epoch(path: Path) -> int:
    epoch = int(path.read_text()) + 1 if path.exists() else 1
    replace_file(path, f"{epoch}\n".encode())
    return epoch


def _remove_unfinished(*folders: Path) -> None:
    for folder in folders:
        for leftover in folder.glob(f"*{TEMPORARY}"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
