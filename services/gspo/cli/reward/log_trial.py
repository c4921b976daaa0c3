"""`gspo reward compare`: another version of a function on the rollouts of a log, and what would have changed.

The function runs in the sandbox of a process of its own (services/gspo/reward/log_trial.py); no service is needed.
"""

import json
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gspo.cli.processes.exit_codes import RunError
from gspo.cli.rundir.start import check_run_dir
from gspo.common.config.loading import CONFIG_NAME
from gspo.common.errors import EXIT_BAD_INPUT, InputError
from gspo.common.host.module_command import module_command
from gspo.common.modules_beside import modules_beside
from gspo.runlog.function_files import read_sources
from gspo.view.log_query import LogQuery

TIMEOUT_S = 900.0
_EQUAL = 1e-9
_COLUMNS = (
    "step", '"group"', "number", "prompt", "messages_json", "columns_json", "token_ids", "text", "outcome", "stop",
    "turns_json", "reward", "parts_json", "prompt_token_ids", "version",
)  # fmt: skip


@dataclass(frozen=True)
class TriedRollout:
    """A rollout under the logged version and under the tried one.

    Attributes:
        old, new: The function's score with its weight; None where it gives none.
        old_reward, new_reward: The whole reward; None where there is none.
        is_flipped: Its reward would have been on the other side of the mean of its group.
        failure: Why the tried version gives no score; empty where it does.
    """

    step: int
    group: int
    number: int
    old: float | None
    new: float | None
    old_reward: float | None
    new_reward: float | None
    is_flipped: bool
    failure: str


def try_on_log(run_dir: Path, candidate: str, name: str, steps: int, most: int) -> list[TriedRollout]:
    """Score the last rollouts of a log again.

    Args:
        candidate: A Python file, or the beginning of a version in the log.
        name: The function whose scores the new ones replace; empty for the only one.
        steps: The number of last steps.
        most: Rollouts, cut to whole groups.

    Raises:
        InputError: The run, the file, the version or the function cannot be used.
        RunError: The process of the sandbox failed.
    """
    check_run_dir(run_dir)
    log = LogQuery(run_dir / "log")
    logged = log.steps()[-steps:]
    if not logged:
        raise InputError(str(run_dir), "has no logged step", "Give a run that has trained")
    sql = f'SELECT {", ".join(_COLUMNS)} FROM log ORDER BY step DESC, "group", number LIMIT ?'
    rows = _whole_groups(log.of_steps(logged, sql, (most + 1,)), most)
    scored = {_function_of(part) for row in rows for part in _parts(row) if part["version"]}
    names = sorted(scored | {source.name for source in read_sources(run_dir / "log") if source.kind == "reward"})
    if name not in names and (name or len(names) != 1):
        problem = f"is {name!r}" if name else "is not given"
        raise InputError("--function", problem, f"Give one that scored these rollouts: {', '.join(names) or 'none'}")
    name = name or names[0]
    question = _question(run_dir, candidate, name) | {
        "rows": rows,
        "name": name,
        "config": str((run_dir / CONFIG_NAME).resolve()),
    }
    return compared(rows, _ask(question), name)


def _question(run_dir: Path, candidate: str, name: str) -> dict[str, Any]:
    """The source, by file or version."""
    matches = [
        source
        for source in read_sources(run_dir / "log")
        if len(candidate) >= 6 and source.version.startswith(candidate)
    ]
    if len(matches) == 1:
        source = matches[0]
        if not source.is_tryable:
            rule = f"{source.name} is more than a source: a server, a model, or a built-in that runs code"
            raise InputError(candidate, rule, "Give a Python file, or a version with a source")
        fields = {"source": source.source, "filename": source.filename, "entry": source.entry, "args": source.args}
        return fields | {"reads": source.reads, "modules": source.modules}
    path = Path(candidate)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"is neither a version in the log nor a file that can be read ({error})"
        raise InputError(candidate, rule, "`gspo view` shows the versions under Functions") from error
    logged = [source for source in read_sources(run_dir / "log") if source.name == name]
    args = logged[-1].args if logged else {}
    modules = modules_beside(path, text, candidate)
    return {"source": text, "filename": path.name, "entry": "", "args": args, "reads": [], "modules": modules}


def _ask(question: dict[str, Any]) -> list[dict[str, Any]]:
    command = module_command("gspo.reward.log_trial")
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"the function took longer than {TIMEOUT_S:g} s; give fewer rollouts with --rollouts") from error
    if done.returncode == EXIT_BAD_INPUT:
        raise InputError(question["filename"], done.stderr.strip()[-1000:], "Correct it and try again")
    if done.returncode:
        raise RunError(f"the sandbox's process ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
    return list(json.loads(done.stdout))


def compared(rows: Sequence[dict[str, Any]], scores: Sequence[dict[str, Any]], name: str) -> list[TriedRollout]:
    """The old and the new scores of rollouts.

    Args:
        rows: Rows of the log: `step`, `group`, `number`, `reward` and `parts_json`.
        scores: `reward` and `failure` of each by the tried version.
        name: The function whose scores are replaced.
    """
    values: list[tuple[float | None, float | None]] = []
    for row, score in zip(rows, scores, strict=True):
        parts = [part for part in _parts(row) if _function_of(part) == name]
        old = sum(part["value"] * part["weight"] for part in parts) if parts else None
        is_whole = row["reward"] is not None and old is not None and score["reward"] is not None
        # If the logged version failed, a reward is known only without other parts.
        is_alone = row["reward"] is None and not _parts(row)
        new_reward = row["reward"] - old + score["reward"] if is_whole else score["reward"] if is_alone else None
        if score["reward"] is None and not score["failure"]:  # the tried version does not apply
            others = [part for part in _parts(row) if part not in parts]
            new_reward = row["reward"] - (old or 0.0) if others and row["reward"] is not None else None
        values.append((old, new_reward))
    old_signs = _signs(rows, [row["reward"] for row in rows])
    new_signs = _signs(rows, [new for _, new in values])
    return [
        TriedRollout(
            row["step"], row["group"], row["number"], old, score["reward"], row["reward"], new_reward,
            is_flipped=old_sign * new_sign < 0, failure=score["failure"] or "",
        )
        for row, score, (old, new_reward), old_sign, new_sign in zip(
            rows, scores, values, old_signs, new_signs, strict=True
        )
    ]  # fmt: skip


def _signs(rows: Sequence[dict[str, Any]], rewards: Sequence[float | None]) -> list[int]:
    """The side of its group's mean on which each reward is: 1, -1, or 0 where it is on neither or missing."""
    groups: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for row, reward in zip(rows, rewards, strict=True):
        if reward is not None:
            groups[row["step"], row["group"]].append(reward)
    signs = []
    for row, reward in zip(rows, rewards, strict=True):
        distance = 0.0 if reward is None else reward - fmean(groups[row["step"], row["group"]])
        signs.append(0 if abs(distance) < _EQUAL else 1 if distance > 0 else -1)
    return signs


def _parts(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for part in json.loads(row["parts_json"] or "[]") if part["value"] is not None]


def _function_of(part: dict[str, Any]) -> str:
    """The function of a part named FUNCTION or FUNCTION/PART."""
    return str(part["name"]).partition("/")[0]


def _whole_groups(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The rows without a last group that is cut."""
    if len(rows) <= most:
        return rows
    last = rows[-1]["step"], rows[-1]["group"]
    whole = [row for row in rows if (row["step"], row["group"]) != last]
    if not whole:
        raise InputError("--rollouts", f"is {most}, less than one group has", "Raise it")
    return whole
