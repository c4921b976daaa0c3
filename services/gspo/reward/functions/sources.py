"""Functions and environments of a configuration: reading their source, with its version, and their options.

It runs no user code.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from gspo.common.config.environment import EnvironmentConfig
from gspo.common.config.fields import Section
from gspo.common.config.reward import RewardConfig, RewardFunction
from gspo.common.errors import InputError, nearest
from gspo.reward.registry.submission import version_of
from gspo.reward.sandbox.calls import Code

BUILTINS = Path(__file__).parent / "builtins"
ENVIRONMENT_KEY = "environment"
_FILES = {"code_tests": "code_runner.py"}
_Options = TypeVar("_Options", bound=Section)


def check_names(config: RewardConfig) -> None:
    """Refuse two functions of one name.

    Raises:
        InputError: Names the second one.
    """
    labels = [function.label for function in config.functions]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            raise InputError(
                f"reward.functions.{index}.name",
                f"'{label}' names two functions",
                "Give each a name of its own with `name:`",
            )


def read_function(function: RewardFunction, key: str) -> Code:
    """The source of one file or built-in; `key` is its place in the configuration.

    Raises:
        InputError: It cannot be read, or is not Python: with line and column.
    """
    path = function.path or BUILTINS / _FILES.get(function.builtin or "", f"{function.builtin}.py")
    data, text = _read_python(path, f"{key}.path")
    version = version_of(data, entry=function.entry, args=function.args)
    # A built-in's file lies among others of the same names as the libraries that they use.
    shown = str(path) if function.path else f"{function.builtin}.py"
    reads = tuple(_existing(place, f"{key}.reads.{i}") for i, place in enumerate(function.reads))
    return Code(function.label, text, version, shown, function.entry, reads=reads)


def read_environment(environment: EnvironmentConfig) -> Code:
    """The source of a configured environment.

    Raises:
        InputError: It cannot be read, or is not Python: with line and column.
    """
    path = environment.path or BUILTINS / f"{environment.builtin}.py"
    data, text = _read_python(path, f"{ENVIRONMENT_KEY}.path")
    version = version_of(data, kind="environment", entry=environment.entry)
    shown = str(environment.path or f"{environment.builtin}.py")
    reads = tuple(_existing(place, f"{ENVIRONMENT_KEY}.reads.{i}") for i, place in enumerate(environment.reads))
    return Code(environment.label, text, version, shown, environment.entry, "environment", reads)


def read_options(options: type[_Options], function: RewardFunction, key: str) -> _Options:
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


def _read_python(path: Path, key: str) -> tuple[bytes, str]:
    """A file's bytes and its text, which compiles; `key` names it in the configuration.

    Raises:
        InputError: It cannot be read, or is not Python: with line and column.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(key, f"{path} cannot be read ({error.strerror})", "Correct the path") from error
    try:
        text = importlib.util.decode_source(data)
        compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f"{path}, line {error.lineno}, column {error.offset}" if error.lineno else str(path)
        raise InputError(key, f"{where}: {error.msg}", "Correct that line") from error
    except (ValueError, LookupError) as error:  # the bytes are not text
        raise InputError(key, f"{path} is not Python text: {error}", "Give a Python file") from error
    return data, text


def _existing(place: Path, key: str) -> Path:
    """The path of a file or folder that user code reads.

    Raises:
        InputError: It does not exist.
    """
    if not place.exists():
        raise InputError(key, f"{place} does not exist", "Give a file or folder that the function reads")
    return place.resolve()
