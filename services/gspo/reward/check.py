"""The check of reward functions before a run: files, signatures, columns, and trial calls with made-up answers.

It starts only the functions' own processes. A run does not load its prompts here: the coordinator does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from gspo.common.config.reward import EnvironmentConfig, RewardFunction
from gspo.common.config.schema import Config
from gspo.common.config.sources import Source
from gspo.common.errors import InputError, nearest, warn
from gspo.common.network.credentials import redis_arguments
from gspo.common.streams.entries import task_json
from gspo.reward.environment_trial import try_server
from gspo.reward.functions.arguments import check_columns
from gspo.reward.functions.configured import open_library
from gspo.reward.functions.environment_steps import EnvironmentSteps
from gspo.reward.functions.library import Function, Library
from gspo.reward.registry.store import OfflineRegistry, Registry
from gspo.reward.sandbox.calls import CallError
from gspo.reward.sandbox.values import NO_VALUE, NOT_A_NUMBER, NOT_FINITE, Failure
from gspo.reward.submissions.callers import read_tokens
from gspo.reward.submissions.trials import prompt_of
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout

NUM_TRIALS = 2
TRIAL_TEXT = "42"
REDIS_TIMEOUT_S = 5.0
# Errors that the function raises for any answer or action; others may come from the made-up one.
ALWAYS_WRONG = ("ImportError", "ModuleNotFoundError", "NameError", "UnfitError", "InvalidReturnError", NOT_A_NUMBER)
_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# `datasets` reads as many bytes to learn a JSON file's columns.
_HEAD_BYTES = 10 * 2**20


def check(config: Config) -> None:
    """Check every reward function of a configuration with two made-up answers.

    Raises:
        InputError: One of them cannot work.
    """
    asyncio.run(_check(config))


async def _check(config: Config) -> None:
    if config.reward.tokens is not None:
        read_tokens(config.reward.tokens)
    sources = config.sources
    async with (
        _open_registry(config) as registry,
        open_library(config.reward, sources=sources, registry=registry) as library,
    ):
        for source in sources:
            await _check_source(source, library, await asyncio.to_thread(_first_prompts, config, source))


async def _check_source(source: Source, library: Library, prompts: dict[str, list[Prompt]]) -> None:
    training, environment = prompts[source.prompts_key], source.environment
    if environment.url is not None:
        await try_server(environment, source.environment_key, task_json(training[0]), TRIAL_TEXT)
    for key, spec in source.code():
        function = await library.find(spec.label, spec.version or "")
        if isinstance(spec, EnvironmentConfig):
            await _try_environment(function, spec, key, [task_json(prompt) for prompt in training])
            continue
        name = f"{function.callee.signature.entry} of {function.code.filename}"
        for file, rows in prompts.items():
            columns = {**json.loads(rows[0].columns_json), **function.args}
            check_columns(function.callee.signature, columns, file, name)
        await _try_function(function, name, spec, key, training)


@asynccontextmanager
async def _open_registry(config: Config) -> AsyncIterator[Registry | OfflineRegistry]:
    """The registry that a run would use: that of its Redis, else this machine's copy alone."""
    if config.services.redis_url is None:
        yield OfflineRegistry(config.registry_dir)
        return
    options = redis_arguments(config.services.redis_url, config)
    options |= {"protocol": 2, "socket_connect_timeout": REDIS_TIMEOUT_S}
    async with Redis.from_url(config.services.redis_url, **options) as redis:
        yield Registry(redis, config.registry_dir, replica="check")


def _first_prompts(config: Config, source: Source) -> dict[str, list[Prompt]]:
    """The first prompts of a source and of its held-out files, by their keys in the configuration."""
    evaluation = config.evaluation
    own = {name: path for name, path in evaluation.files.items() if config.source_of(name) == source}
    prompts = {}
    for key, path in {
        source.prompts_key: source.prompts,
        **{evaluation.key_of(name): own[name] for name in own},
    }.items():
        rows = _read_first_rows(path, NUM_TRIALS, key)
        prompts[key] = [_prompt_of(row, source, str(path)) for row in rows]
    return prompts


async def _try_function(
    function: Function, name: str, spec: RewardFunction, where: str, prompts: Sequence[Prompt]
) -> None:
    """Score made-up answers.

    Args:
        name: Of the function, for messages.
        where: Its key in the configuration.

    Raises:
        InputError: The function cannot work with any answer.
    """
    trials = [
        Rollout(prompt=prompts[number % len(prompts)], text=TRIAL_TEXT, token_ids=[0], outcome=OUTCOME_EOS)
        for number in range(NUM_TRIALS)
    ]
    try:
        values, _ = await function.score(trials, session="")
    except CallError as error:
        wrong_return = error.error_type == "InvalidReturnError"
        fix = "Return a list with one number for each completion" if wrong_return else "Correct the function"
        _judge(error.error_type, str(error), where, name, fix)
        return
    failures = [value for value in values if isinstance(value, Failure)]
    if len(failures) == len(values) and all(failure.error_type == NOT_FINITE for failure in failures):
        raise InputError(
            where,
            f"{name}, tried on {len(values)} made-up answers ('{TRIAL_TEXT}'), {failures[0].reason} for each",
            "Return finite numbers, and raise an exception where an answer cannot be judged",
        )
    for value in values:
        if isinstance(value, Failure):
            fix = "Return numbers" if value.error_type == NOT_A_NUMBER else "Correct the function"
            _judge(value.error_type, value.reason, where, name, fix)
            continue
        for part in spec.part_weights:
            if part not in value.parts:
                fix = nearest(part, value.parts) if value.parts else "Leave it out"
                raise InputError(f"{where}.part_weights.{part}", f"{name} returned no such part", fix)


def _judge(error_type: str, reason: str, where: str, name: str, fix: str) -> None:
    """Refuse a failure that comes for any answer, and warn of one that the made-up answer may have caused."""
    if error_type in ALWAYS_WRONG:
        raise InputError(where, f"{name} {reason}", fix)
    if error_type != NO_VALUE:  # None says by TRL's convention that the function does not apply
        warn(f"{where}: {name}, tried on a made-up answer, {reason}")


async def _try_environment(function: Function, spec: EnvironmentConfig, where: str, tasks_json: Sequence[str]) -> None:
    """Begin with each task, and take one step.

    Raises:
        InputError: The environment cannot work: a reset failed, a reset's second result differs from its first, or a
            step failed in a way that no action explains.
    """
    steps, name = EnvironmentSteps(None, session=None), f"of {function.code.filename}"
    calls_json = "[]" if spec.tools else ""
    for task in tasks_json:
        try:
            turn = await steps.reset(function, task)
            again = await steps.reset(function, task)
        except CallError as error:
            may_be_the_task = error.error_type not in ALWAYS_WRONG
            fix = ", or give the data set the columns that it reads: they are in the task, beside `prompt`"
            rule = f"reset {name}, given {task[:200]}: {error}"
            raise InputError(where, rule, f"Correct it{fix if may_be_the_task else ''}") from error
        if turn != again:
            raise InputError(
                where,
                f"reset {name} gave another state or observation the second time, for {task[:200]}",
                "Draw random numbers from a seed in the task: the rollouts of a group begin alike",
            )
        try:
            await steps.step(function, turn.state_json, TRIAL_TEXT, calls_json)
        except CallError as error:
            if error.error_type in ALWAYS_WRONG:
                raise InputError(where, f"step {name}: {error}", "Correct it") from error
            warn(f"{where}: step {name}, tried on the action '{TRIAL_TEXT}', {error}")


def _read_first_rows(path: Path, count: int, key: str) -> list[dict[str, Any]]:
    """The first `count` rows of a file or folder, or fewer where there are not so many; `key` is named in errors.

    Raises:
        InputError: There is nothing that can be read.
    """
    if not path.exists():
        raise InputError(key, f"{path} does not exist", "Give the path of a file of prompts")
    if path.is_file() and path.suffix.lower() not in _BUILDERS:
        fix = "Convert it, or give a folder that `datasets` opens"
        raise InputError(key, f"{path} is none of {', '.join(_BUILDERS)}", fix)
    try:
        # JSON lines are read here: the import of `datasets` would be half of the check's time.
        lines = path.is_file() and path.suffix.lower() == ".jsonl"
        rows = _read_lines(path, count) if lines else _read_with_datasets(path, count)
    except (ValueError, OSError, StopIteration) as error:
        reason = (str(error.__cause__ or error) or "it is empty").splitlines()[0]
        raise InputError(key, f"{path} cannot be read ({reason})", "Correct the file") from error
    if not rows:
        raise InputError(key, f"{path} has no rows", "Give a file with at least one prompt")
    return rows


def _read_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file; a column that a row leaves out is None in it."""
    with path.open("rb") as file:
        head = {number: json.loads(line) for number, line in enumerate(file.readlines(_HEAD_BYTES), 1) if line.strip()}
    if wrong := [number for number, row in head.items() if not isinstance(row, dict)]:
        raise ValueError(f"line {wrong[0]} is not an object")
    names = dict.fromkeys(name for row in head.values() for name in row)
    return [{name: row.get(name) for name in names} for row in itertools.islice(head.values(), count)]


def _read_with_datasets(path: Path, count: int) -> list[dict[str, Any]]:
    """Rows of a file or folder that `datasets` opens; of several splits, those of the training split."""
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read at import: files here need no hub
    import datasets

    datasets.disable_progress_bars()
    try:
        if path.is_file():
            arguments = {"path": _BUILDERS[path.suffix.lower()], "data_files": str(path)}
            opened = datasets.load_dataset(**arguments, split="train", streaming=True)
        elif any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
            opened = datasets.load_from_disk(str(path))
        else:
            opened = datasets.load_dataset(str(path), streaming=True)
        if isinstance(opened, dict):
            opened = opened["train"] if "train" in opened else next(iter(opened.values()))
        rows: Iterable[dict[str, Any]] = itertools.islice(opened, count)
        return list(rows)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(str(error)) from error


def _prompt_of(row: dict[str, Any], source: Source, where: str) -> Prompt:
    """A row as a prompt without token ids: its other columns are what reward functions see.

    Raises:
        InputError: There is no such column.
    """
    prompt_column = source.prompt_column
    if prompt_column not in row:
        fix = f"Set {source.column_key}. {nearest(prompt_column, row)}"
        raise InputError(source.column_key, f"{where} has no column '{prompt_column}'", fix)
    return prompt_of(row[prompt_column], {name: value for name, value in row.items() if name != prompt_column})
