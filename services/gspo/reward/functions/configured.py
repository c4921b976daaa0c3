"""The functions and environments of a configuration: read, opened, and loaded before the run needs them."""

import hashlib
import importlib.util
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from gspo.common.config.fields import Section
from gspo.common.config.reward import EnvironmentConfig, RewardConfig, RewardFunction
from gspo.common.config.schema import ModelConfig
from gspo.common.config.sources import CodeSpec, Source, code_of
from gspo.common.errors import InputError, nearest
from gspo.common.modules_beside import modules_beside
from gspo.reward.functions.arguments import check_args
from gspo.reward.functions.classifier import PROGRAM, ClassifierOptions, ClassifierProcess
from gspo.reward.functions.library import Function, Library, UnknownFunctionError
from gspo.reward.functions.policy_code import CodeTests, ToolEnvironment
from gspo.reward.functions.remote import Judge, JudgeOptions, RemoteFunction
from gspo.reward.registry.records import version_of
from gspo.reward.registry.store import OfflineRegistry, Registry
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.calls import CallError, CallLimits, Code, CodeKind
from gspo.reward.sandbox.execution import Sandbox
from gspo.reward.sandbox.launch import Importable
from gspo.reward.sandbox.levels import find_level

BUILTINS = Path(__file__).parent / "builtins"
HOW_TO_REGISTER = (
    "Submit it first (`gspo reward serve`, then `gspo reward submit FILE`), or name a file with `path:` or a `builtin:`"
)
_Options = TypeVar("_Options", bound=Section)


@asynccontextmanager
async def open_library(
    config: RewardConfig,
    *,
    sources: Sequence[Source] = (),
    registry: Registry | OfflineRegistry | None = None,
    usage: UsageCounter | None = None,
    model: ModelConfig | None = None,
) -> AsyncIterator[Library]:
    """The library of a run, with the functions and environments of its sources loaded.

    Args:
        sources: One with the functions of `config` alone by default.
        model: The policy's, for functions that name its tokenizer.

    Raises:
        InputError: One cannot be read or loaded, does not take its arguments, or is not registered; or two have one
            name.
    """
    sources = sources or (Source(functions=config.functions),)
    specs = code_of(sources)
    library = Library(
        CallLimits(config.timeout_s, config.memory_mb, config.cpu_s),
        confinement=await find_level(config.sandbox_minimum),
        num_workers=config.workers,
        registry=registry,
        usage=usage,
        step_timeout_s=max(source.environment.step_timeout_s for source in sources),
        model=model,
    )
    opened = {key: open_function(spec, key, library) for key, spec in specs.items() if not spec.registered}
    library.configured.update((function.code.name, function) for function in opened.values())
    try:
        for key, function in opened.items():
            await _load_configured(function, key)
        for key, spec in specs.items() if registry is not None else ():
            if spec.registered:
                await _load_registered(library, spec, key)
        yield library
    finally:
        await library.close()


def open_function(spec: CodeSpec, key: str, library: Library) -> Function:
    """A function or environment of the configuration, not loaded yet; `key` is its place in there.

    Raises:
        InputError: It cannot be read, or an argument of it is wrong.
    """
    limits = replace(library.limits, memory_mb=spec.memory_mb or library.limits.memory_mb)
    if isinstance(spec, EnvironmentConfig):
        code, limits = read_code(spec, key), replace(limits, timeout_s=spec.step_timeout_s)
        tools = spec.builtin == "tools"
        return Function(code, library.sandbox(code, limits, ToolEnvironment if tools else Sandbox))
    limits = replace(limits, timeout_s=spec.timeout_s or limits.timeout_s)
    if spec.url is not None:
        version = _digest(json.dumps([spec.url, spec.args], sort_keys=True, default=str))
        remote = RemoteFunction(spec.url, timeout_s=limits.timeout_s, fields=spec.args)
        return Function(Code(spec.label, "", version, spec.url), remote)
    if spec.builtin == "llm_judge":
        judging = _read_options(JudgeOptions, spec, key)
        code = Code(spec.label, "", _digest(judging.model_dump_json()), judging.url)
        return Function(code, Judge(judging, timeout_s=limits.timeout_s))
    if spec.builtin == "reward_model":
        options = _read_options(ClassifierOptions, spec, key)
        version = version_of(PROGRAM.read_bytes(), args=options.model_dump())
        code = Code(spec.label, "", version, options.model)
        return Function(code, ClassifierProcess(options, timeout_s=limits.timeout_s))
    code = read_code(spec, key)
    if spec.builtin == "code_tests":
        return Function(code, library.sandbox(replace(code, kind="environment"), limits, CodeTests), spec.args)
    return Function(code, library.sandbox(code, limits), spec.args)


def read_code(spec: CodeSpec, key: str) -> Code:
    """The source of one file or built-in; `key` is its place in the configuration.

    Raises:
        InputError: It cannot be read, or is not Python: with line and column.
    """
    path, entry, shown = spec.path, spec.entry, str(spec.path)
    if path is None:
        path = BUILTINS / f"{spec.builtin}.py"
        if not path.exists():
            path, entry = BUILTINS / "rules.py", spec.builtin
        shown = path.name
    where = f"{key}.path"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(where, f"{path} cannot be read ({error.strerror})", "Correct the path") from error
    try:
        text = importlib.util.decode_source(data)
        compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{path}, line {error.lineno}, column {error.offset}" if error.lineno else str(path)
        raise InputError(where, f"{place}: {error.msg}", "Correct that line") from error
    except (ValueError, LookupError) as error:  # the bytes are not text
        raise InputError(where, f"{path} is not Python text: {error}", "Give a Python file") from error
    for index, place_read in enumerate(spec.reads):
        if not place_read.exists():
            fix = "Give a file or folder that the function reads"
            raise InputError(f"{key}.reads.{index}", f"{place_read} does not exist", fix)
    reads = tuple(place_read.resolve() for place_read in spec.reads)
    modules = modules_beside(path, text, where, Importable(reads).__contains__) if spec.path else {}
    kind: CodeKind = "environment" if isinstance(spec, EnvironmentConfig) else "reward"
    args = {} if isinstance(spec, EnvironmentConfig) else spec.args
    version = version_of(data, kind, entry, args=args, modules=modules)
    return Code(spec.label, text, version, shown, entry, kind, reads, modules)


def _read_options(options: type[_Options], function: RewardFunction, key: str) -> _Options:
    """The `args` of a built-in that takes options of a fixed form.

    Raises:
        InputError: An option is missing, unknown or of a wrong type.
    """
    try:
        return options.model_validate(function.args)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        fix = nearest(name, options.model_fields) if first["type"] == "extra_forbidden" else "Correct it"
        raise InputError(f"{key}.args.{name}", first["msg"], fix) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def _load_configured(function: Function, key: str) -> None:
    try:
        signature = await function.callee.load()
    except CallError as error:
        raise InputError(key, f"{function.code.filename} {error}", _how_to_fix(error, function.code.kind)) from error
    check_args(function.args, signature, key, f"{signature.entry} of {function.code.filename}")


async def _load_registered(library: Library, spec: CodeSpec, key: str) -> None:
    """Find a registered function or environment before the run needs it."""
    try:
        function = await library.find(spec.label, spec.version or "")
    except UnknownFunctionError as error:
        raise InputError(f"{key}.name", str(error), HOW_TO_REGISTER) from error
    kind = "environment" if isinstance(spec, EnvironmentConfig) else "reward"
    if function.code.kind != kind:
        are = {"environment": "an environment", "reward": "a reward function"}
        rule = f"'{spec.label}' is registered as {are[function.code.kind]}, not {are[kind]}"
        raise InputError(f"{key}.name", rule, "Name another, or submit it as that kind")


def _how_to_fix(error: CallError, kind: CodeKind) -> str:
    if kind == "environment" and error.error_type == "UnfitError":
        return "Define reset(task) and step(state, action), or name the object that has them: `entry:`"
    if error.error_type == "SeveralFunctionsError":
        return "Name one with `entry:`, or list the file once for each with `name:` and `entry:`"
    if error.error_type == "UnfitError":
        return "Define reward(prompts, completions, **columns) or verl's compute_score, or name the function: `entry:`"
    if error.error_type == "ModuleNotFoundError":
        return (
            "A module beside the file is taken along where an import names it. Name another one under `reads`, or "
            "install its package into the Python of this service"
        )
    if error.error_type == "UnfitTokenizerError":
        return "Install transformers into the Python of this service, and give model.path a folder with tokenizer.json"
    if error.error_type == "MemoryError":
        return "Raise reward.memory_mb"
    if error.kind == "timeout":
        return "Do less at the top of the file: it is run before the first answer is scored"
    return "Correct the file; it must load in the Python of this service"
