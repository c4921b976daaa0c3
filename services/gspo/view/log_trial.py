"""Another version of a function on the rollouts of a log, and what would have changed: a trial.

`gspo reward compare` makes trials, and the page of a run one at a time. The function runs in the sandbox of a process
of its own (services/gspo/reward/log_trial.py); no service is needed.
"""

import asyncio
import json
import os
import signal
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gspo.common.config.loading import CONFIG_NAME
from gspo.common.errors import EXIT_BAD_INPUT, InputError
from gspo.common.host.module_command import module_command
from gspo.common.modules_beside import modules_beside
from gspo.runlog.function_files import read_sources
from gspo.view.log_query import LogQuery

# Of a trial for the page: the newest steps that are looked at, rollouts of them in whole groups, and its limit.
STEPS, MAX_ROLLOUTS, TRIAL_S = 10, 200, 120.0
_INTERRUPT_S, _MAX_ERROR_CHARS = 5.0, 1000
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

    @property
    def is_changed(self) -> bool:
        """Whether its score is another one, or none."""
        return self.new != self.old or bool(self.failure)


class TrialError(Exception):
    """There are no scores; the message says why. `status` is that of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class LogTrials:
    """Trials on the log of one run, one at a time.

    Args:
        run_dir: The run's.
        timeout_s: Limit of a trial.
    """

    def __init__(self, run_dir: Path, timeout_s: float = TRIAL_S) -> None:
        self._run_dir, self.timeout_s = run_dir, timeout_s
        self._is_busy = False

    async def tried(self, version: str, function: str) -> list[TriedRollout]:
        """The newest rollouts under a recorded version.

        Args:
            version: A whole version, as the log has it.
            function: The function whose scores it replaces.

        Raises:
            TrialError: Another trial runs, no sandbox can be started, the version cannot be used, or it is slow.
        """
        if self._is_busy:
            raise TrialError(409, f"another comparison is running; it ends within {self.timeout_s:g} s")
        self._is_busy = True
        try:
            return await try_on_log(self._run_dir, version, function, STEPS, MAX_ROLLOUTS, self.timeout_s)
        except InputError as error:
            raise TrialError(422, str(error)) from error
        finally:
            self._is_busy = False


async def try_on_log(
    run_dir: Path, candidate: str, name: str, steps: int, most: int, timeout_s: float
) -> list[TriedRollout]:
    """Score the last rollouts of a log again.

    Args:
        candidate: A Python file, or the beginning of a version in the log.
        name: The function whose scores the new ones replace; empty for the only one.
        steps: The number of last steps.
        most: Rollouts, cut to whole groups.

    Raises:
        InputError: The run, the file, the version or the function cannot be used.
        TrialError: The process of the sandbox failed, or took longer than `timeout_s`.
    """
    question = await asyncio.to_thread(_question, run_dir, candidate, name, steps, most)
    return compared(question["rows"], await _ask(question, timeout_s), question["name"])


def _question(run_dir: Path, candidate: str, name: str, steps: int, most: int) -> dict[str, Any]:
    """The rollouts, and the function that is to score them."""
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
    config = str((run_dir / CONFIG_NAME).resolve())
    return {**_source(run_dir, candidate, name), "rows": rows, "name": name, "config": config}


def _source(run_dir: Path, candidate: str, name: str) -> dict[str, Any]:
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


async def _ask(question: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    # In a session of its own it can be ended together with the sandbox's process.
    process = await asyncio.create_subprocess_exec(
        *module_command("gspo.reward.log_trial"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate(json.dumps(question).encode())
    except TimeoutError as error:
        text = f"the comparison took longer than {timeout_s:g} s; gspo reward compare takes fewer rollouts (--rollouts)"
        raise TrialError(504, text) from error
    finally:
        await asyncio.shield(_end(process))
    reason = errors.decode(errors="replace").strip()[-_MAX_ERROR_CHARS:]
    if process.returncode == EXIT_BAD_INPUT:
        raise InputError(question["filename"], reason.removeprefix("error: "), "Correct it and try again")
    if process.returncode:
        raise TrialError(422, f"the sandbox's process ended with code {process.returncode}: {reason}")
    return list(json.loads(output))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Interrupt what still runs, so that it closes its sandbox; kill it if that takes long."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(_INTERRUPT_S):
                await process.wait()


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
