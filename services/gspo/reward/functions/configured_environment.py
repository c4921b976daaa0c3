"""The environment of a configuration: its file or built-in as the sandbox loads it.

It calls nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gspo.common.config.environment import EnvironmentConfig
from gspo.reward.functions.arguments import BUILTINS, FunctionSource, existing, read_python
from gspo.reward.functions.tool_calls import ToolEnvironment
from gspo.reward.registry.submission import version_of
from gspo.reward.sandbox.calls import Callee, CallLimits, Code
from gspo.reward.sandbox.execution import Sandbox

ENVIRONMENT_KEY = "environment"


def open_environment(
    environment: EnvironmentConfig, limits: CallLimits, sandbox: Callable[[Code, CallLimits], Sandbox]
) -> tuple[FunctionSource, Callee]:
    """A configured environment, not loaded yet.

    Args:
        limits: Of reward functions; a step has its own time.
        sandbox: Makes one.

    Raises:
        InputError: Its file cannot be read, or is not Python.
    """
    source = read_environment(environment)
    own = replace(limits, timeout_s=environment.step_timeout_s, memory_mb=environment.memory_mb or limits.memory_mb)
    made = sandbox(source.code, own)
    return source, ToolEnvironment(made) if environment.builtin == "tools" else made


def read_environment(environment: EnvironmentConfig) -> FunctionSource:
    """The text of a configured environment.

    Raises:
        InputError: It cannot be read, or is not Python.
    """
    path = environment.path or BUILTINS / f"{environment.builtin}.py"
    data, text = read_python(path, f"{ENVIRONMENT_KEY}.path")
    shown = environment.path or Path(f"{environment.builtin}.py")
    version = version_of(data, kind="environment", entry=environment.entry)
    reads = tuple(existing(place, f"{ENVIRONMENT_KEY}.reads.{i}") for i, place in enumerate(environment.reads))
    return FunctionSource(
        environment.label, shown, text, version, environment.entry, 1.0, kind="environment", reads=reads
    )
