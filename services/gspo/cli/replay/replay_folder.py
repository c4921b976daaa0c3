"""The folder of a replay: a run directory in form, with links to files of the recorded run.

Links keep a file for the replay when the run removes it, and cost no space. A file on another disk gets a symbolic one.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gspo.cli.replay.replay_plan import ReplayPlan
from gspo.cli.rundir.start import environment
from gspo.common.config.loading import CONFIG_NAME, ENVIRONMENT_NAME, parse_config, write_config
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.common.host.durable_write import replace_file
from gspo.runlog.checkpoint_files import CHECKPOINTS, whole_checkpoints
from gspo.runlog.left_out import LEFT_OUT
from gspo.runlog.run_log import LOG_FOLDER, LOSS_NAME, NOT_APPLIED, REPLAYED_VERSIONS, VERSIONS
from gspo.runlog.step_files import step_files
from gspo.view.picture.replay_results import REPLAYS

# The configuration of the steps before those that --with changes.
LEAD_CONFIG = "lead.yaml"
_PURPOSE = "replay.json"


def default_folder(plan: ReplayPlan) -> Path:
    """`replays/steps-10-20` in the run directory; changed keys add eight digits of their digest."""
    name = f"steps-{plan.first}-{plan.last}"
    if plan.changed.values:
        name += "-" + hashlib.sha256("\n".join(plan.changed.lines()).encode()).hexdigest()[:8]
    return plan.run_dir / REPLAYS / name


def check_folder(plan: ReplayPlan, out: Path | None) -> Path:
    """The folder of a replay, which nothing else uses.

    Raises:
        InputError: `out` holds something else, or lies in the recorded run.
    """
    if out is None:
        return default_folder(plan)
    path = out.resolve()
    if path == plan.run_dir or (plan.run_dir in path.parents and plan.run_dir / REPLAYS not in path.parents):
        raise InputError("--out", f"{out} is in the run directory, which a replay does not change", "Name another")
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / _PURPOSE).exists())):
        raise InputError("--out", f"{out} exists and is not the folder of a replay", "Name a new one")
    return path


def fill(plan: ReplayPlan, path: Path) -> bool:
    """Fill the folder, unless an earlier call for the same replay did; whether it was filled. The caller has locked it.

    Raises:
        InputError: The folder cannot be written, or the run has removed a file meanwhile.
    """
    try:
        purpose = _purpose(plan)
        with suppress(OSError, ValueError):
            if json.loads((path / _PURPOSE).read_text()) == purpose:
                return False
        _clear(path)
        for file in _step_files(plan).values():
            _link(file, path / LOG_FOLDER / file.name)
        for file in _checkpoint_files(plan):
            _link(file, path / CHECKPOINTS / file.relative_to(plan.run_dir / CHECKPOINTS))
        _write_record(plan, path)
        for name, config in ((CONFIG_NAME, plan.changed.config), (LEAD_CONFIG, plan.recorded)):
            write_config(_of_folder(config, path), path / name)
        facts = environment(plan.changed.config)
        replace_file(path / ENVIRONMENT_NAME, (json.dumps(facts, indent=2) + "\n").encode())
    except (FileNotFoundError, KeyError) as error:
        rule = f"step files or the checkpoint of step {plan.start} are gone: the run has removed them meanwhile"
        raise InputError(str(plan.run_dir), rule, "Call again: the plan then has the present files") from error
    except OSError as error:
        rule = f"{path} cannot be written ({error.strerror})"
        raise InputError("--out", rule, "Name a folder on a disk where you may write") from error
    # Last: a folder without it is filled again.
    replace_file(path / _PURPOSE, json.dumps(purpose, indent=2).encode())
    return True


def take_loss(plan: ReplayPlan, path: Path, *, lead: bool) -> None:
    """Give the folder the copy of a loss of the user's own: the run's, or the one of --with."""
    loss = plan.changed.config.algorithm.loss.path
    if lead or "algorithm.loss.path" not in plan.changed.values:
        loss = plan.run_dir / LOSS_NAME if plan.recorded.algorithm.loss.path else None
    if loss is None:
        return
    try:
        replace_file(path / LOSS_NAME, loss.read_bytes())
    except FileNotFoundError as error:
        raise InputError("algorithm.loss.path", f"{loss} does not exist", "Put it back, or give another") from error


def _purpose(plan: ReplayPlan) -> dict[str, Any]:
    """The purpose of a folder: a replay of other files, keys or libraries is another one."""
    files = [*_step_files(plan).values(), *_checkpoint_files(plan)]
    stats = {str(file.relative_to(plan.run_dir)): file.stat() for file in files}
    content = {
        "run": str(plan.run_dir),
        "steps": [plan.start, plan.first, plan.last],
        "with": plan.changed.lines(),
        "keys": _digest(plan.recorded.model_dump_json() + plan.changed.config.model_dump_json()),
        "recorded": _digest("".join(line for line in _lines(plan.run_dir / LOG_FOLDER / VERSIONS, plan.last))),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "environment": environment(plan.changed.config),
    }
    loaded: dict[str, Any] = json.loads(json.dumps(content))
    return loaded


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _step_files(plan: ReplayPlan) -> Mapping[int, Path]:
    files = step_files(plan.run_dir / LOG_FOLDER)
    return {step: files[step] for step in range(plan.start + 1, plan.last + 1)}


def _checkpoint_files(plan: ReplayPlan) -> list[Path]:
    if not plan.start:
        return []
    checkpoint = whole_checkpoints(plan.run_dir)[plan.start]
    return sorted(file for file in checkpoint.rglob("*") if file.is_file())


def _clear(path: Path) -> None:
    """Remove what an earlier replay left; its lock stays."""
    path.mkdir(parents=True, exist_ok=True)
    for entry in path.iterdir():
        if entry.name == "services":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or a file of another user
        target.symlink_to(source)


def _write_record(plan: ReplayPlan, path: Path) -> None:
    """The recorded versions, for their hyperparameters; the steps and mini-batches that were not applied."""
    log = plan.run_dir / LOG_FOLDER
    replace_file(path / REPLAYED_VERSIONS, "".join(_lines(log / VERSIONS, plan.last)).encode())
    # Under other keys a mini-batch may well be finite.
    last = plan.first - 1 if plan.changed.trains_otherwise else plan.last
    (path / LOG_FOLDER).mkdir(exist_ok=True)
    replace_file(path / LOG_FOLDER / LEFT_OUT, "".join(_lines(log / LEFT_OUT, plan.last)).encode())
    replace_file(path / LOG_FOLDER / NOT_APPLIED, "".join(_lines(log / NOT_APPLIED, last)).encode())


def _lines(path: Path, last: int) -> Iterable[str]:
    """The whole lines of a file of the log up to a step."""
    text = path.read_text() if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines(keepends=True):
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= last:
                yield line


def _of_folder(config: Config, path: Path) -> Config:
    """The configuration as the replay's process takes it: of its own folder, without trackers or generators."""
    keys = config.model_dump(mode="json")
    keys["name"] = re.sub(r"[^A-Za-z0-9._-]|^[._-]", "x", path.name)[:64] or "replay"
    keys["run"]["directory"], keys["tracking"], keys["placement"] = str(path.parent), {}, "split"
    if config.algorithm.loss.path is not None:
        keys["algorithm"]["loss"]["path"] = str(path / LOSS_NAME)
    return parse_config(keys, path)
