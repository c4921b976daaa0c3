"""What `--check` finds in reward functions before anything starts: files, signatures, columns, one trial call.
An environment is tried by environment_check.py.

It starts the functions' own processes and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from gspo.common.config.reward import RewardFunction
from gspo.common.config.schema import Config
from gspo.common.errors import InputError, nearest, warn
from gspo.common.network.credentials import redis_arguments
from gspo.common.streams.environment_task import task_json
from gspo.reward.environment_check import try_environment
from gspo.reward.first_rows import prompt_of, read_first_rows
from gspo.reward.functions.arguments import arguments_for, check_columns
from gspo.reward.functions.library import Function
from gspo.reward.registry.disk import OfflineRegistry
from gspo.reward.registry.store import Registry
from gspo.reward.sandbox.calls import CallError, values_of
from gspo.reward.sandbox.values import describe
from gspo.reward.scoring.scorer import open_scorer
from gspo.reward.submissions.callers import read_tokens
from gspo_proto.rollout_pb2 import OUTCOME_EOS, Prompt, Rollout

NUM_TRIALS = 2
TRIAL_TEXT = "42"
REDIS_TIMEOUT_S = 5.0
# A function that raises one of these cannot work with any answer; others may come from the made-up one.
NEVER_THE_ANSWER = ("ImportError", "ModuleNotFoundError", "NameError", "UnfitError", "InvalidReturnError")


def check(config: Config) -> None:
    """Check every reward function of a configuration with two made-up answers.

    Raises:
        InputError: One of them cannot work.
    """
    asyncio.run(_check(config))


async def _check(config: Config) -> None:
    if config.reward.tokens is not None:
        read_tokens(config.reward.tokens)
    async with (
        _registered(config) as registry,
        open_scorer(config.reward, name="check", environment=config.environment, registry=registry) as scorer,
    ):
        prompts = await asyncio.to_thread(_first_prompts, config)
        training = prompts["data.prompts"]
        trials = [_made_up(training[i % len(training)]) for i in range(NUM_TRIALS)]
        for index, wanted in enumerate(config.reward.functions):
            function = await scorer.library.find(wanted.label, wanted.version or "")
            for key, found in prompts.items():
                row = json.loads(found[0].columns_json)
                check_columns(function.source, function.callee.signature, row, key)
            await _try(function, wanted, f"reward.functions.{index}", trials)
        if config.environment.used:
            environment = config.environment
            function = await scorer.library.find(environment.label, environment.version or "")
            await try_environment(function, [task_json(prompt) for prompt in training], bool(environment.tools))


@asynccontextmanager
async def _registered(config: Config) -> AsyncIterator[Registry | OfflineRegistry]:
    """What a run would find registered: in the Redis that it is given, else in this machine's copy alone."""
    if config.services.redis_url is None:
        yield OfflineRegistry(config.registry_dir)
        return
    given = redis_arguments(config.services.redis_url, config)
    redis = Redis.from_url(config.services.redis_url, protocol=2, socket_connect_timeout=REDIS_TIMEOUT_S, **given)
    try:
        yield Registry(redis, config.registry_dir, replica="check")
    finally:
        await redis.aclose()


def _first_prompts(config: Config) -> dict[str, list[Prompt]]:
    found = {}
    held_out = {config.evaluation.key_of(name): path for name, path in config.evaluation.files.items()}
    for key, path in {"data.prompts": config.data.prompts, **held_out}.items():
        rows = read_first_rows(path, NUM_TRIALS, key)
        found[key] = [prompt_of(row, config.data.prompt_column, str(path)) for row in rows]
    return found


def _made_up(prompt: Prompt) -> Rollout:
    return Rollout(prompt=prompt, text=TRIAL_TEXT, token_ids=[0], outcome=OUTCOME_EOS)


async def _try(function: Function, wanted: RewardFunction, where: str, trials: list[Rollout]) -> None:
    callee = function.callee
    name = f"{callee.signature.entry} of {function.source.path}"
    try:
        answer = await callee.call(arguments_for(callee.signature, trials, function.source.args))
        raw = values_of(answer, len(trials))
    except CallError as error:
        if error.error_type in NEVER_THE_ANSWER:
            wrong_return = error.error_type == "InvalidReturnError"
            fix = "Return a list with one number for each completion" if wrong_return else "Mend the function"
            raise InputError(where, f"{name} {error}", fix) from error
        warn(f"{where}: {name}, tried on a made-up answer, {error}")
        return
    _check_finite(raw, where, name)
    for value in raw:
        _check_value(value, where, name)
        _check_parts(value, wanted, where, name)


def _check_finite(raw: list[Any], where: str, name: str) -> None:
    """Refuse NaN or infinity for every made-up answer: it comes for any answer. For one, that answer may be why."""
    found = [shown for value in raw if (shown := _not_finite(value))]
    if len(found) == len(raw):
        raise InputError(
            where,
            f"{name}, tried on {len(raw)} made-up answers ('{TRIAL_TEXT}'), returned {found[0]} for each",
            "Return finite numbers, and raise an exception where an answer cannot be judged",
        )
    for shown in found:
        warn(f"{where}: {name}, tried on a made-up answer, returned {shown}")


def _not_finite(value: Any) -> str:
    """NaN or infinity as shown to people, with the name of its part; empty for anything else."""
    if isinstance(value, dict) and isinstance(value.get("parts"), dict):
        named = ((part, _not_finite(number)) for part, number in value["parts"].items())
        return next((f"{shown} as '{part}'" for part, shown in named if shown), "")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else ""


def _check_value(value: Any, where: str, name: str) -> None:
    """A number, None, or a dict of them; an exception of one row is only reported."""
    if not isinstance(value, dict):
        return
    if isinstance(error := value.get("error"), dict):
        said = describe(error)
        if error.get("type") in NEVER_THE_ANSWER:
            raise InputError(where, f"{name} {said}", "Mend the function")
        warn(f"{where}: {name}, tried on a made-up answer, {said}")
    elif isinstance(parts := value.get("parts"), dict):
        for part in parts.values():
            _check_value(part, where, name)
    else:
        raise InputError(where, f"{name} returned {value.get('type')} where a number belongs", "Return numbers")


def _check_parts(value: Any, wanted: RewardFunction, where: str, name: str) -> None:
    """Every part that has a weight is there; a value that failed tells nothing."""
    parts = value.get("parts") if isinstance(value, dict) else {}
    for part in wanted.part_weights:
        if isinstance(parts, dict) and part not in parts:
            rule = f"is no part of what {name} returned"
            raise InputError(f"{where}.part_weights.{part}", rule, nearest(part, parts) if parts else "Leave it out")
