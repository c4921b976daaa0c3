"""The run directory as the learner holds it: locked, one epoch a life, and the only truth about the run.

Whether it belongs to this configuration is the command line's question. Who decides what is written: assembly.py,
the trainer, the loop.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from gspo.common.errors import InputError
from gspo.learner.assembly.rows import Row
from gspo.learner.assembly.settlements import SettledGroup, Settlement, Settlements
from gspo.learner.storage.checkpoints import Checkpoints
from gspo.learner.storage.disk_space import DiskSpace
from gspo.learner.storage.durable_files import TEMPORARY, JsonLines, finite_or_null, replace_whole
from gspo.learner.storage.step_log import StepLog


@dataclass(frozen=True)
class PolicyVersion:
    """A version of the policy: the one name by which everyone knows it is (version, digest).

    Attributes:
        dtype: Of the weights that the digest is of; empty in logs that do not say.
        hyperparameters: What the step was trained with, by the names in making.py; None of version 0, and in logs
            that do not say.
    """

    version: int
    digest: str
    step: int
    dtype: str = ""
    hyperparameters: Mapping[str, float] | None = None


class RunDir:
    """The run directory in the hands of its one learner, from opening to `close`.

    Opening locks it, raises the epoch, removes what a kill left unfinished, and reads how every group ended.

    Args:
        disk: Waits for room before each write, where it does; opening does not wait.

    Attributes:
        trained_s: Seconds that the recorded steps took before it was opened.

    Raises:
        InputError: Another learner holds the directory, or it cannot be written.
        ValueError: Something else wrote into the log: a broken line, or a group that ended twice.
    """

    def __init__(self, path: Path, disk: DiskSpace | None = None) -> None:
        self.path = path
        log_folder = path / "log"
        self.steplog = StepLog(log_folder, disk)
        self.checkpoints = Checkpoints(path / "checkpoints")
        _check_writable(path)
        for folder in (log_folder, self.checkpoints.folder):
            folder.mkdir(exist_ok=True)
        with ExitStack() as held:
            held.callback(os.close, _take_lock(path))
            self.epoch = _raise_epoch(path / "epoch")
            _remove_unfinished(log_folder, self.checkpoints.folder)
            self._settled_lines = held.enter_context(JsonLines(log_folder / "settled.jsonl", disk))
            self._policy_lines = held.enter_context(JsonLines(log_folder / "policy.jsonl", disk))
            self._metrics_lines = held.enter_context(JsonLines(log_folder / "metrics.jsonl", disk))
            self._evaluation_lines = held.enter_context(JsonLines(log_folder / "evaluations.jsonl", disk))
            self._not_applied_lines = held.enter_context(JsonLines(log_folder / "not_applied.jsonl", disk))
            self._trained_lines: set[int] = set()
            self.settlements = self._read_settlements()
            self._versions = {r["version"]: _policy_version(r) for r in self._policy_lines.records()}
            steps = self._metrics_lines.records()
            self._measured_steps = {r["step"] for r in steps}
            self.trained_s = sum(r["figures"].get("step_s") or 0.0 for r in steps)
            self._not_applied = {(r["step"], r["update"]) for r in self._not_applied_lines.records()}
            evaluations = self._evaluation_lines.records()
            self._evaluations = {r["label"]: _num_prompts(r["figures"]) for r in evaluations}
            # A version's first score counts: what was kept or removed by it is not there to be judged again.
            self._scores = {r["version"]: r["score"] for r in reversed(evaluations) if r.get("score") is not None}
            self._open_files = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file and let the lock go."""
        self._open_files.close()

    def write_step(self, step: int, rows: Sequence[Row]) -> None:
        """Log a step before it is trained; its groups are then settled as trained.

        FileExistsError: the step is logged already, and stays as it is.
        ValueError: a row of another step, or a group that has ended before.
        """
        if self.steplog.path(step).exists():
            raise FileExistsError(f"{self.steplog.path(step)} is there: step {step} is logged already")
        groups = sorted({row.group for row in rows})
        if wrong := {row.step for row in rows} - {step}:
            raise ValueError(f"step {step} was given rows of step {sorted(wrong)}")
        self._refuse_settled(groups)
        self.steplog.write(step, rows)
        for group in groups:
            self.settlements.add(group, Settlement.TRAINED)

    def read_step(self, step: int) -> list[Row]:
        """A logged step's rows in training order. FileNotFoundError: it is not in the log."""
        return self.steplog.read(step)

    def steps(self) -> list[int]:
        """The logged steps that are still there, in order."""
        return self.steplog.steps()

    def steps_to_replay(self, after: int) -> list[int]:
        """The logged steps after step `after`, in order. ValueError: one of them is missing."""
        steps = [step for step in self.steps() if step > after]
        if missing := set(range(after + 1, max(steps, default=after) + 1)) - set(steps):
            raise ValueError(
                f"{self.steplog.path(min(missing))} is missing: the log cannot be replayed from the state after "
                f"step {after}. Put the file back, or a checkpoint that is newer"
            )
        return steps

    def settle(self, groups: Sequence[SettledGroup]) -> None:
        """Record how groups ended that are not trained; on the disk when this returns.

        ValueError: one of them has ended before; nothing is written then.
        """
        self._refuse_settled([settled.group for settled in groups])
        self._append_settled(groups)
        for settled in groups:
            self.settlements.add(settled.group, settled.settlement)

    def append_version(
        self,
        version: int,
        digest: str,
        step: int,
        *,
        dtype: str = "",
        hyperparameters: Mapping[str, float] | None = None,
    ) -> None:
        """Record a policy version; on the disk when this returns.

        One that a replay made again with the same digest is not written twice; with another digest it is, and the
        newest digest holds, and hyperparameters once recorded stay where none are given.
        """
        if (recorded := self.version(version)) and recorded.digest == digest:
            return
        if hyperparameters is None and recorded:
            hyperparameters = recorded.hyperparameters
        made = PolicyVersion(version, digest, step, dtype, hyperparameters)
        self._policy_lines.append([{**asdict(made), "unix_s": time.time()}])
        self._versions[version] = made

    def versions(self) -> list[PolicyVersion]:
        """Every recorded version, in order."""
        return [self._versions[version] for version in sorted(self._versions)]

    def version(self, version: int) -> PolicyVersion | None:
        """What is recorded of a version, the newest record; None where there is none."""
        return self._versions.get(version)

    def append_not_applied(self, step: int, left_out: Iterable[Mapping[str, Any]]) -> None:
        """Record the mini-batches of a step that were not applied, each once; on the disk when this returns.

        A record has `update`, `mini_batch` and `reason`, as updates.py names them.
        """
        new = [record for record in left_out if (step, record["update"]) not in self._not_applied]
        if new:
            self._not_applied_lines.append({"step": step, **record, "unix_s": time.time()} for record in new)
            self._not_applied |= {(step, record["update"]) for record in new}

    def not_applied(self, step: int) -> list[int]:
        """The updates of a step that are recorded as not applied."""
        return sorted(update for of_step, update in self._not_applied if of_step == step)

    def append_metrics(self, step: int, version: int, figures: Mapping[str, float]) -> bool:
        """Record a step's figures, once. Returns False, and writes nothing, where a replay trained it again."""
        if step in self._measured_steps:
            return False
        record = {"step": step, "version": version, "unix_s": time.time(), "figures": finite_or_null(figures)}
        self._metrics_lines.append([record])
        self._measured_steps.add(step)
        return True

    def append_evaluation(
        self,
        label: str,
        version: int,
        step: int,
        figures: Mapping[str, float],
        *,
        file: str = "",
        score: float | None = None,
    ) -> bool:
        """Record an evaluation, once a label, unless it is of more prompts than the one that is recorded.

        Args:
            file: Name of the held-out file.
            score: What evaluation.keep_best compares.

        Returns False, and writes nothing, where it is recorded.
        """
        num_prompts = _num_prompts(figures)
        if label in self._evaluations and num_prompts <= self._evaluations[label]:
            return False
        record = {"label": label, "version": version, "step": step, "unix_s": time.time(), "file": file, "score": score}
        self._evaluation_lines.append([{**record, "figures": finite_or_null(figures)}])
        self._evaluations[label] = num_prompts
        if score is not None:
            self._scores.setdefault(version, score)
        return True

    def evaluations(self) -> list[str]:
        """The labels of the recorded evaluations, in the order of recording."""
        return list(self._evaluations)

    def scores(self) -> dict[int, float]:
        """Version -> what evaluation.keep_best compares, of the versions that have it."""
        return dict(self._scores)

    def prune(self, *, keep_checkpoints: int, keep_log_steps: int | None) -> None:
        """Remove checkpoints and step files beyond those to be kept.

        A step that the replay after any kept checkpoint needs stays, and all stay while there is no checkpoint.
        """
        whole = self.checkpoints.steps()
        for step in whole[:-keep_checkpoints]:
            self.checkpoints.remove(step)
        if keep_log_steps is None or not whole:
            return
        oldest_kept = whole[-keep_checkpoints:][0]
        removable = [step for step in self.steps()[:-keep_log_steps] if step <= oldest_kept]
        self._remove_steps(removable)

    def _remove_steps(self, steps: Sequence[int]) -> None:
        """Remove step files; how their groups ended is written down first, for it is known from nowhere else."""
        trained = [
            SettledGroup(group, Settlement.TRAINED, f"step {step}, whose file was removed under keep_log_steps")
            for step in steps
            for group in self.steplog.groups(step)
            if group not in self._trained_lines
        ]
        self._append_settled(trained)
        self._trained_lines.update(settled.group for settled in trained)
        self.steplog.remove(steps)

    def _append_settled(self, groups: Sequence[SettledGroup]) -> None:
        now = time.time()
        self._settled_lines.append(
            {"group": s.group, "settlement": s.settlement.value, "reason": s.reason, "unix_s": now}
            | ({"response_tokens": list(s.response_tokens)} if s.response_tokens else {})
            for s in groups
        )

    def _refuse_settled(self, groups: Sequence[int]) -> None:
        for group in groups:
            if (ended := self.settlements.get(group)) is not None:
                raise ValueError(f"group {group} is settled already: '{ended}'")

    def _read_settlements(self) -> Settlements:
        settlements = Settlements()
        for record in self._settled_lines.records():
            settlements.add(record["group"], Settlement(record["settlement"]))
        self._trained_lines.update(g for g in settlements if settlements.get(g) is Settlement.TRAINED)
        for step in self.steplog.steps():
            # A kill between the line and the removal of the file leaves both.
            for group in set(self.steplog.groups(step)) - self._trained_lines:
                settlements.add(group, Settlement.TRAINED)
        return settlements


def _take_lock(path: Path) -> int:
    """The descriptor that holds the lock; the system lets it go with the process, however that ends."""
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 4096).decode(errors="replace") or "a learner that is just starting"
        os.close(descriptor)
        raise InputError(
            str(path), f"one learner at a time, and it is held by {holder}", "Let that run end, or stop it"
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
    replace_whole(path, f"{epoch}\n".encode())
    return epoch


def _remove_unfinished(*folders: Path) -> None:
    for folder in folders:
        for leftover in folder.glob(f"*{TEMPORARY}"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def _num_prompts(figures: Mapping[str, float | None]) -> float:
    return figures.get("num_prompts") or 0.0


def _policy_version(record: dict[str, Any]) -> PolicyVersion:
    return PolicyVersion(**{field.name: record[field.name] for field in fields(PolicyVersion) if field.name in record})
