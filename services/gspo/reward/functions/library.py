"""The functions that score, by name and version: those of the run's configuration, and those registered over REST.

Each is loaded at its first call, and stays loaded while it is among the MAX_LOADED last used. A call keeps the function
it began with, so the activation of another version does not disturb in-flight calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gspo.common.config.environment import EnvironmentConfig
from gspo.common.config.reward import RewardConfig, RewardFunction
from gspo.common.errors import InputError, nearest
from gspo.common.telemetry import metrics
from gspo.reward.functions.arguments import NOT_ASKED
from gspo.reward.functions.classifier import ClassifierProcess, read_classifier
from gspo.reward.functions.code_tests import CodeTests
from gspo.reward.functions.judge import Judge, read_judge
from gspo.reward.functions.remote import RemoteFunction, read_remote
from gspo.reward.functions.sources import ENVIRONMENT_KEY, check_names, read_environment, read_function
from gspo.reward.functions.tool_calls import ToolEnvironment
from gspo.reward.registry.disk import OfflineRegistry
from gspo.reward.registry.records import Content, NotRegisteredError
from gspo.reward.registry.store import Registry
from gspo.reward.registry.submission import Kind, RequestedLimits
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.calls import Callee, CallError, CallLimits, Code, raising_call_errors
from gspo.reward.sandbox.execution import Sandbox
from gspo.reward.sandbox.levels import Confinement, find_level

# Each holds a process or more; a run uses a handful.
MAX_LOADED = 32
HOW_TO_REGISTER = (
    "Submit it first (`gspo reward serve`, then `gspo reward submit FILE`), or name a file with `path:` or a `builtin:`"
)


@dataclass
class Function:
    """One version of a function, and the process or server that answers its calls.

    Attributes:
        code: Its text is empty for a callee without a sandbox.
        args: Further keyword arguments of each call, from the configuration.
    """

    code: Code
    callee: Callee
    args: dict[str, Any] = field(default_factory=dict)
    calls_in_flight: int = field(default=0, compare=False)


@contextmanager
def counted(function: Function, usage: UsageCounter | None, *, num_answers: int) -> Iterator[None]:
    """Count the block as one call of a function, which is not ended meanwhile.

    Args:
        usage: None counts no call, as in a trial.
        num_answers: Rollouts, rows or steps that the call is about.

    Raises:
        CallError: The block raised something.
    """
    code, started, result = function.code, time.perf_counter(), "ok"
    function.calls_in_flight += 1
    try:
        with raising_call_errors(code.name):
            yield
    except CallError as error:
        result = "not_asked" if error.error_type == NOT_ASKED else error.kind
        if usage is not None:
            usage.fail(code.name, code.version, result, str(error), error.traceback, error.output)
        raise
    finally:
        function.calls_in_flight -= 1
        if usage is not None:
            seconds = time.perf_counter() - started
            metrics.REWARD_CALLS.labels(code.name, result).inc()
            metrics.REWARD_SECONDS.labels(code.name).observe(seconds)
            usage.add(code.name, code.version, answers=num_answers, seconds=seconds)


class UnknownFunctionError(Exception):
    """There is no function of this name and version, or it cannot be loaded; the message says why."""


class Library:
    """Finds functions.

    Args:
        configured: Those of the run's configuration, loaded; `open_library` adds to them.
        limits: The limits of a call, for a registered function without its own.
        confinement: The level for user code.
        num_workers: Calls of one function that are answered at the same time.
        registry: None if nothing can be registered.
        usage: Counts calls; None counts none.
        step_timeout_s: Wall clock of a step of a registered environment without its own limit; None: as other calls.
    """

    def __init__(
        self,
        configured: Sequence[Function],
        limits: CallLimits,
        *,
        confinement: Confinement,
        num_workers: int = 1,
        registry: Registry | OfflineRegistry | None = None,
        usage: UsageCounter | None = None,
        step_timeout_s: float | None = None,
    ) -> None:
        call = ("reward.timeout_s", limits.timeout_s)
        step = ("environment.step_timeout_s", step_timeout_s) if step_timeout_s is not None else call
        self._timeouts: dict[Kind, tuple[str, float]] = {"reward": call, "environment": step}
        self.confinement, self._num_workers = confinement, num_workers
        self.configured = {function.code.name: function for function in configured}
        self.usage = usage
        self._limits, self._registry = limits, registry
        self._loaded: OrderedDict[tuple[str, str], Function] = OrderedDict()
        self._loading: dict[tuple[str, str], asyncio.Task[Function]] = {}

    async def find(self, name: str, version: str = "") -> Function:
        """The function, loaded: of the configuration, else the registered one's active version, or `version`.

        Raises:
            UnknownFunctionError: There is none, or it cannot be loaded.
        """
        if name in self.configured:
            return self._configured(name, version)
        if self._registry is None:
            raise UnknownFunctionError(
                f"there is no reward function of this name; known are {', '.join(self.configured)}"
            )
        try:
            content = await self._registry.resolve(name, version)
        except NotRegisteredError as error:
            raise UnknownFunctionError(str(error)) from error
        try:
            return await self.load(name, content)
        except CallError as error:
            raise UnknownFunctionError(f"version {content.version[:12]} cannot be loaded: {error}") from error

    def _configured(self, name: str, version: str) -> Function:
        function = self.configured[name]
        if not function.code.version.startswith(version):
            loaded = function.code.version[:12]
            raise UnknownFunctionError(f"version {version[:12]} is asked for and {loaded} is loaded")
        return function

    async def load(self, name: str, content: Content) -> Function:
        """A registered version, loaded once for all concurrent callers.

        Raises:
            CallError: It cannot be loaded.
        """
        key = (name, content.version)
        if key not in self._loaded:
            if key not in self._loading:
                self._loading[key] = asyncio.create_task(self._load(name, content), name=f"load {name}")
                self._loading[key].add_done_callback(lambda _: self._loading.pop(key, None))
            # The load continues if one of several waiting callers is cancelled.
            function = await asyncio.shield(self._loading[key])
            self._loaded[key] = function
            await self._forget_oldest(key)
            return function
        self._loaded.move_to_end(key)
        return self._loaded[key]

    async def _load(self, name: str, content: Content) -> Function:
        # It was admitted under a configuration that allowed more.
        if beyond := self.beyond_limits(content.kind, content.limits):
            raise CallError("forbidden", beyond[0][1])
        code = code_of(name, content)
        function = Function(code, self.sandbox(code, self.limits_of(content)))
        try:
            with raising_call_errors(name):
                await function.callee.load()
        except CallError:
            await function.callee.close()
            raise
        return function

    def sandbox(self, code: Code, limits: CallLimits, *, load_timeout_s: float | None = None) -> Sandbox:
        """A sandbox for a submitted or registered function."""
        level, num_workers = self.confinement.level, self._num_workers
        return Sandbox(code, limits, level, num_workers=num_workers, load_timeout_s=load_timeout_s)

    def limits_of(self, content: Content) -> CallLimits:
        """The limits of one call of a version."""
        own = content.limits
        return CallLimits(
            timeout_s=own.timeout_s or self._timeouts[content.kind][1],
            memory_mb=own.memory_mb or self._limits.memory_mb,
            cpu_s=own.cpu_s or self._limits.cpu_s,
        )

    def beyond_limits(self, kind: Kind, asked: RequestedLimits) -> list[tuple[str, str]]:
        """The requested limits beyond the configuration's: pairs of field and problem."""
        bounds = {
            "timeout_s": self._timeouts[kind],
            "memory_mb": ("reward.memory_mb", self._limits.memory_mb),
            "cpu_s": ("reward.cpu_s", self._limits.cpu_s),
        }
        problems = []
        for name, (key, most) in bounds.items():
            value = getattr(asked, name)
            if value is not None and most is not None and value > most:
                text = f"limits.{name}: is {value:g}, and {key} allows {most:g} at most. Ask for less, or raise {key}"
                problems.append((f"limits.{name}", text))
        return problems

    async def _forget_oldest(self, newest: tuple[str, str]) -> None:
        """End the processes of the longest unused functions, but not of `newest` and of those with in-flight calls."""
        idle = [key for key, function in self._loaded.items() if not function.calls_in_flight and key != newest]
        # All leave the list before the first wait: another load may come here meanwhile.
        forgotten = [self._loaded.pop(key) for key in idle[: max(0, len(self._loaded) - MAX_LOADED)]]
        await asyncio.gather(*(function.callee.close() for function in forgotten))

    async def close(self) -> None:
        """End every process."""
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        functions = [*self.configured.values(), *self._loaded.values()]
        await asyncio.gather(*(function.callee.close() for function in functions))


def code_of(name: str, content: Content) -> Code:
    """A registered version as the sandbox loads it."""
    return Code(name, content.source, content.version, f"{name}.py", content.entry or None, content.kind)


@asynccontextmanager
async def open_library(
    config: RewardConfig,
    *,
    environment: EnvironmentConfig | None = None,
    registry: Registry | OfflineRegistry | None = None,
    usage: UsageCounter | None = None,
) -> AsyncIterator[Library]:
    """The library of a run, with every function of its configuration loaded, and its environment.

    Raises:
        InputError: One cannot be read or loaded, does not take its arguments, or is not registered.
    """
    check_names(config)
    confinement = await find_level(config.sandbox_minimum)
    limits = CallLimits(config.timeout_s, config.memory_mb, config.cpu_s)
    keys = [f"reward.functions.{index}" for index in range(len(config.functions))]
    named = dict(zip(keys, config.functions, strict=True))
    library = Library(
        [],
        limits,
        confinement=confinement,
        num_workers=config.workers,
        registry=registry,
        usage=usage,
        step_timeout_s=environment.step_timeout_s if environment is not None else None,
    )
    configured = {
        key: open_function(function, key, limits, library) for key, function in named.items() if not function.registered
    }
    if environment is not None and environment.used and not environment.registered:
        configured[ENVIRONMENT_KEY] = open_environment(environment, limits, library.sandbox)
    library.configured.update((function.code.name, function) for function in configured.values())
    try:
        for key, function in configured.items():
            await _load_configured(function, key)
        if registry is not None:
            for key, spec in named.items():
                if spec.registered:
                    await _load_registered(library, spec.label, spec.version, key)
            if environment is not None and environment.registered:
                await _load_registered(library, environment.label, environment.version, ENVIRONMENT_KEY)
        yield library
    finally:
        await library.close()


def open_function(function: RewardFunction, key: str, limits: CallLimits, library: Library) -> Function:
    """A function of the configuration, not loaded yet; `key` is its place in there.

    Raises:
        InputError: It cannot be read, or an argument of it is wrong.
    """
    own = CallLimits(function.timeout_s or limits.timeout_s, function.memory_mb or limits.memory_mb, limits.cpu_s)
    if function.url is not None:
        remote = RemoteFunction(function.url, timeout_s=own.timeout_s, fields=function.args)
        return Function(read_remote(function), remote)
    if function.builtin == "llm_judge":
        code, judging = read_judge(function, key)
        return Function(code, Judge(judging, timeout_s=own.timeout_s))
    if function.builtin == "reward_model":
        code, options = read_classifier(function, key)
        return Function(code, ClassifierProcess(options, timeout_s=own.timeout_s))
    code = read_function(function, key)
    if function.builtin == "code_tests":
        return Function(code, CodeTests(library.sandbox(replace(code, kind="environment"), own)), function.args)
    return Function(code, library.sandbox(code, own), function.args)


def open_environment(
    environment: EnvironmentConfig, limits: CallLimits, new_sandbox: Callable[[Code, CallLimits], Sandbox]
) -> Function:
    """The environment of the configuration, not loaded yet; a step has its own time limit.

    Args:
        limits: Of reward functions.

    Raises:
        InputError: Its file cannot be read, or is not Python.
    """
    code = read_environment(environment)
    own = replace(limits, timeout_s=environment.step_timeout_s, memory_mb=environment.memory_mb or limits.memory_mb)
    sandbox = new_sandbox(code, own)
    return Function(code, ToolEnvironment(sandbox) if environment.builtin == "tools" else sandbox)


async def _load_configured(function: Function, key: str) -> None:
    try:
        signature = await function.callee.load()
    except CallError as error:
        raise InputError(key, f"{function.code.filename} {error}", _how_to_fix(error, key)) from error
    for name in function.args:
        if name not in signature.takes and not signature.takes_any:
            raise InputError(
                f"{key}.args.{name}",
                f"{signature.entry} of {function.code.filename} has no such parameter",
                nearest(name, signature.takes),
            )


async def _load_registered(library: Library, name: str, version: str | None, key: str) -> None:
    """Find a registered function or environment before the run needs it."""
    try:
        function = await library.find(name, version or "")
    except UnknownFunctionError as error:
        raise InputError(f"{key}.name", str(error), HOW_TO_REGISTER) from error
    kind = "environment" if key == ENVIRONMENT_KEY else "reward"
    if function.code.kind != kind:
        are = {"environment": "an environment", "reward": "a reward function"}
        rule = f"'{name}' is registered as {are[function.code.kind]}, not {are[kind]}"
        raise InputError(f"{key}.name", rule, "Name another, or submit it as that kind")


def _how_to_fix(error: CallError, key: str) -> str:
    if key == ENVIRONMENT_KEY and error.error_type == "UnfitError":
        return "Define reset(task) and step(state, action), or name the object that has them: `entry:`"
    if error.error_type == "SeveralFunctionsError":
        return "Name one with `entry:`, or list the file once for each with `name:` and `entry:`"
    if error.error_type == "UnfitError":
        return "Define reward(prompts, completions, **columns) or verl's compute_score, or name the function: `entry:`"
    if error.error_type == "MemoryError":
        return "Raise reward.memory_mb"
    if error.kind == "timeout":
        return "Do less at the top of the file: it is run before the first answer is scored"
    return "Correct the file; it must load in the Python of this service"
