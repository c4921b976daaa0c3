"""The file of a loss of the user's own: tried before the start, and kept in the run directory, without torch.

The run trains with its copy, so that a change of the file changes no run. A resume with another file is refused.
"""

import hashlib
import json
import os
import subprocess
from pathlib import Path

from gspo.common.config.algorithm import LossConfig
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.durable_write import replace_file
from gspo.common.host.module_command import module_command
from gspo.runlog.run_log import LOSS_NAME, RunLog

TRIAL_S = 120.0
_KEY, _TRIAL, _LAST_LINES = "algorithm.loss.path", "gspo.learner.objective.loss_trial", 4


def check_own_loss(config: Config, *, timeout_s: float = TRIAL_S) -> None:
    """Refuse a loss of the user's own that breaks a rule on made-up tensors, or is not that of the run.

    Args:
        timeout_s: Longest trial, with the start of its process.

    Raises:
        InputError: The file is not that of the run, cannot be run, never returns, or its function breaks a rule.
    """
    loss = config.algorithm.loss
    if loss.path is None:
        return
    _check_same(loss.path, _read(loss.path), config.run_dir)
    problem = _trial(loss.path, loss, timeout_s)
    if problem is not None:
        raise InputError(_KEY, f"{loss.path}: {loss.entry} {problem['rule']}", problem["fix"])


def keep_loss_file(config: Config, run_dir: Path) -> None:
    """Copy the file into a run directory that has trained nothing; a run that has trained keeps its copy.

    Raises:
        InputError: The file cannot be read, or the copy of a run that has trained is gone.
    """
    path = config.algorithm.loss.path
    if path is None:
        return
    if RunLog(run_dir).has_trained():
        _kept(path, run_dir)
    else:
        replace_file(run_dir / LOSS_NAME, _read(path))


def with_kept_loss(config: Config, run_dir: Path) -> Config:
    """The configuration with the copy as the file; the same where there is no loss of the user's own."""
    loss = config.algorithm.loss
    if loss.path is None:
        return config
    return config.with_keys(algorithm={"loss": loss.model_copy(update={"path": run_dir / LOSS_NAME})})


def _check_same(path: Path, source: bytes, run_dir: Path) -> None:
    if not RunLog(run_dir).has_trained():
        return
    kept = _kept(path, run_dir)
    if kept != source:
        raise InputError(
            _KEY,
            f"{path} has changed (SHA-256 {_digest(source)}...) since the run began to train ({_digest(kept)}...)",
            f"Set it back from {run_dir / LOSS_NAME}, or start a new run under another name",
        )


def _kept(path: Path, run_dir: Path) -> bytes:
    copy = run_dir / LOSS_NAME
    try:
        return copy.read_bytes()
    except OSError as error:
        rule = f"{copy}, the run's copy of {path}, cannot be read ({error.strerror}), and the run has trained with it"
        raise InputError(_KEY, rule, "Put it back, or start a new run under another name") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fix = f"Give the path of a Python file; a run directory has a copy as {LOSS_NAME}"
        raise InputError(_KEY, f"{path} cannot be read ({error.strerror})", fix) from error


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:12]


def _trial(path: Path, loss: LossConfig, timeout_s: float) -> dict[str, str] | None:
    """The rule that the function breaks with its fix, or None; by a process with a time limit, without a GPU."""
    command = [*module_command(_TRIAL), str(path), loss.entry, json.dumps(loss.reference)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment, errors="replace"
        )
    except subprocess.TimeoutExpired:
        rule = f"has not returned from a trial on small tensors within {timeout_s:g} s"
        return {"rule": rule, "fix": "Correct the function, or try again on a machine that is less busy"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = " ".join(done.stderr.strip().splitlines()[-_LAST_LINES:]) or "it wrote nothing"
        return {"rule": f"ended its process with exit code {done.returncode} ({reason})", "fix": "Correct the function"}
    problem: dict[str, str] | None = json.loads(lines[-1])
    return problem
