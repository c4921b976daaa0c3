"""The check of reward functions before a run: files, signatures, columns, and trial calls with made-up answers.

It starts only the functions' own processes. It reads every row as the coordinator does, and warns of likely mistakes in
the columns; the coordinator's check is about the prompts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from gspo.common.config.reward import EnvironmentConfig, RewardFunction
from gspo.common.config.schema import Config
from gspo.common.config.sources import Source
from gspo.common.data.column_survey import AnswerConflicts, ColumnSurvey, RowTally, short_place
from gspo.common.data.row_reader import RowReader
from gspo.common.data.task_row import check_names, split_row
from gspo.common.errors import InputError, nearest, warn
from gspo.common.network.credentials import redis_arguments
from gspo.common.streams.entries import task_json
from gspo.environments.server_trial import try_server
from gspo.reward.functions.arguments import GROUND_TRUTH_RULE, check_columns, right_answer, supplied
from gspo.reward.functions.column_reads import silent_columns
from gspo.reward.functions.configured import open_library
from gspo.reward.functions.environment_steps import EnvironmentSteps
from gspo.reward.functions.library import Function, Library
from gspo.reward.registry.store import OfflineRegistry, Registry
from gspo.reward.sandbox.calls import CallError
from gspo.reward.sandbox.values import NOT_A_NUMBER, NOT_FINITE, SCORE_CONVENTIONS, Failure
from gspo.reward.submissions.callers import read_tokens
from gspo.reward.submissions.trials import prompt_of
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout

NUM_TRIALS = 2
TRIAL_TEXT = "42"
REDIS_TIMEOUT_S = 5.0
# Errors that the function raises for any answer or action; others may come from the made-up one.
ALWAYS_WRONG = ("ImportError", "ModuleNotFoundError", "NameError", "UnfitError", "InvalidReturnError", NOT_A_NUMBER)


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
        open_library(config.reward, sources=sources, registry=registry, model=config.model) as library,
    ):
        for source in sources:
            await _check_source(source, library, await asyncio.to_thread(_read_data, config, source))


async def _check_source(source: Source, library: Library, data: dict[str, _Data]) -> None:
    training, environment = data[source.key("prompts")].prompts, source.environment
    for column, kind in data[source.key("prompts")].left_out.items():
        warn(
            f"{source.key('prompts')}: column '{column}' has {kind}, which the policy does not see and rollouts do not "
            f"carry; {source.key('types')}.{column}: base64 sends them to rewards as text, omit says that you know"
        )
    if environment.kind == "url":
        await try_server(environment, source.key("environment"), task_json(training[0]), TRIAL_TEXT)
    for key, spec in source.code():
        function = await library.find(spec.label, spec.version or "")
        if isinstance(spec, EnvironmentConfig):
            await _try_environment(function, spec, key, [task_json(prompt) for prompt in training])
            continue
        name = f"{function.callee.signature.entry} of {function.code.filename}"
        for file, own in data.items():
            _check_columns(function, own, file, name, source.key("types"))
        if await _try_function(function, name, spec, key, training):
            for file in data.keys() - {source.key("prompts")}:
                await _try_held_out(function, name, file, data[file].prompts)


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


@dataclass(frozen=True)
class _Data:
    """The data of one key, as a check needs it.

    Attributes:
        prompts: The first ones.
        names: Every column but the prompt's.
        survey: The columns of all rows.
        unanswered: Rows without a right answer.
        left_out: Columns of bytes -> "images" or "bytes".
    """

    prompts: list[Prompt]
    names: list[str]
    survey: ColumnSurvey
    unanswered: RowTally
    left_out: dict[str, str]


def _read_data(config: Config, source: Source) -> dict[str, _Data]:
    """The data of a source and of its held-out files, by their keys in the configuration.

    Raises:
        InputError: Something in it cannot be read, or it lacks a column that the source names.
    """
    evaluation = config.evaluation
    files = {source.key("prompts"): source.prompts}
    files |= {
        evaluation.key_of(name): (path,) for name, path in evaluation.files.items() if config.source_of(name) == source
    }
    return {key: _read(key, paths, source) for key, paths in files.items()}


def _read(key: str, paths: Sequence[Path], source: Source) -> _Data:
    survey, unanswered, blank, prompts = ColumnSurvey(), RowTally(), RowTally(), list[dict[str, Any]]()
    reader, conflicts = RowReader(key, paths, source.types, types_key=source.key("types")), AnswerConflicts()
    for row in survey.watch(reader):
        if len(prompts) < NUM_TRIALS:
            prompts.append(row.columns)
        prompt, columns = split_row(row.columns, source)
        if (answer := right_answer(columns)) is None:
            unanswered.add(short_place(row))
        else:
            conflicts.see(prompt, answer, row)
            if isinstance(answer, str) and not answer.strip():
                blank.add(short_place(row))
    names = list(survey.columns)
    check_names(names, source, ", ".join(map(str, paths)))
    # Types that several sources share may name columns of one of them.
    if key == source.key("prompts") and ("types" in source.own or not source.name):
        for name in sorted(reader.unused_types):
            rule = f"no row of {key} has a column '{name}'. {nearest(name, names)}"
            if name in names:
                rule = f"column '{name}' of {key} has no bytes, for which base64 is. Leave it out"
            warn(f"{source.key('types')}.{name}: has no effect, for {rule}")
    for mistake in survey.mistakes(prompt_column=source.prompt_column):
        warn(f"{key}: {mistake}")
    if blank.count > survey.few:  # the survey names the slips
        warn(f"{key}: the right answer is empty text in {blank}")
    if conflicts.rows.count:
        warn(f"{key}: one prompt has two right answers in {conflicts.rows}")
    empty = dict.fromkeys(names)
    # A column that a row leaves out is None in it.
    first = [prompt_of(*split_row({**empty, **columns}, source)) for columns in prompts]
    return _Data(first, list(json.loads(first[0].columns_json)), survey, unanswered, reader.left_out)


def _check_columns(function: Function, data: _Data, key: str, name: str, types_key: str) -> None:
    """Check that the data of a key has what a function asks for, and say which rows lack it."""
    signature, survey = function.callee.signature, data.survey
    for column in data.left_out.keys() & signature.required:
        rule = f"column '{column}', which {name} asks for, has {data.left_out[column]}, and these reach no function"
        raise InputError(key, rule, f"Set {types_key}.{column}: base64, which makes them text")
    has_answers = data.unanswered.count < survey.num_rows or right_answer(function.args) is not None
    columns = {*data.names, *function.args}
    check_columns(signature, columns, key, name, has_answers=has_answers)
    for column in silent_columns(function.code.text, signature.entry, columns | supplied(signature)):
        there = ", ".join(sorted(columns)) or "no other column"
        warn(f"{key}: {name} reads '{column}', and every row lacks this column: the data set has {there}")
    for column in signature.required:
        if column in survey.columns and (gap := survey.without_value(column)).count:
            warn(f"{key}: column '{column}', which {name} asks for, has no value in {gap}")
    if signature.convention in SCORE_CONVENTIONS and has_answers and data.unanswered.count:
        warn(f"{key}: there is no right answer for {name} in {data.unanswered} ({GROUND_TRUTH_RULE})")


async def _try_held_out(function: Function, name: str, where: str, prompts: Sequence[Prompt]) -> None:
    """Score made-up answers to the prompts of a held-out file, with a function that scores those to training prompts.

    Raises:
        InputError: It can score none of them: the file lacks what it reads.
    """
    try:
        values, _ = await function.score(_trials(prompts), session="")
        reasons = [value.reason for value in values if isinstance(value, Failure)]
    except CallError as error:
        values, reasons = [None], [str(error)]
    if len(reasons) == len(values):
        rule = f"{name} scores made-up answers to training prompts, and none to prompts of this file: it {reasons[0]}"
        raise InputError(where, rule, "Give the file the columns that the function reads, such as the right answers")


def _trials(prompts: Sequence[Prompt]) -> list[Rollout]:
    return [
        Rollout(prompt=prompts[number % len(prompts)], text=TRIAL_TEXT, token_ids=[0], outcome=OUTCOME_EOS)
        for number in range(NUM_TRIALS)
    ]


async def _try_function(
    function: Function, name: str, spec: RewardFunction, where: str, prompts: Sequence[Prompt]
) -> bool:
    """Score made-up answers.

    Args:
        name: The function's, for messages.
        where: Its key in the configuration.

    Returns:
        Whether it scored one of them.

    Raises:
        InputError: The function cannot work with any answer.
    """
    try:
        values, _ = await function.score(_trials(prompts), session="")
    except CallError as error:
        wrong_return = error.error_type == "InvalidReturnError"
        fix = "Return a list with one number for each completion" if wrong_return else "Correct the function"
        _judge(error, str(error), where, name, fix)
        return False
    failures = [value for value in values if isinstance(value, Failure)]
    if len(failures) == len(values) and all(failure.error_type == NOT_FINITE for failure in failures):
        raise InputError(
            where,
            f"{name}, tried on {len(values)} made-up answers ('{TRIAL_TEXT}'), {failures[0].reason} for each",
            "Return finite numbers, and raise an exception where an answer cannot be judged",
        )
    for value in values:
        if value is None:  # it does not apply to this answer
            continue
        if isinstance(value, Failure):
            fix = "Return numbers" if value.error_type == NOT_A_NUMBER else "Correct the function"
            _judge(value, value.reason, where, name, fix)
            continue
        for part in spec.part_weights:
            if part not in value.parts:
                fix = nearest(part, value.parts) if value.parts else "Leave it out"
                raise InputError(f"{where}.part_weights.{part}", f"{name} returned no such part", fix)
    return len(failures) < len(values)


def _judge(failure: CallError | Failure, reason: str, where: str, name: str, fix: str) -> None:
    """Refuse a failure that comes for any answer, and warn of one that the made-up answer may have caused."""
    if failure.error_type in ALWAYS_WRONG or failure.kind == "forbidden":
        raise InputError(where, f"{name} {reason}", fix)
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
