"""The functions that score, by name and version: those of the run's configuration, and those registered over REST.

Each is loaded at its first call, and stays loaded while it is among the MAX_LOADED last used. A call keeps the function
it began with, so the activation of another version does not disturb in-flight calls. configured.py fills it.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import structlog

from gspo.common.config.schema import ModelConfig
from gspo.common.model.files import read_tokenizer_files
from gspo.common.telemetry import metrics
from gspo.reward.functions.arguments import NotAskableError, arguments_for
from gspo.reward.registry.records import Content, Kind, NotRegisteredError, RequestedLimits
from gspo.reward.registry.store import OfflineRegistry, Registry
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.calls import Callee, CallError, CallLimits, Code
from gspo.reward.sandbox.execution import Sandbox
from gspo.reward.sandbox.launch import ConfinementLevel
from gspo.reward.sandbox.values import Result, read_value, with_logged
from gspo_proto.rollout_pb2 import Rollout

# Each holds a process or more; a run uses a handful.
MAX_LOADED = 32
log = structlog.get_logger()


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

    async def score(self, rollouts: Sequence[Rollout], *, session: str | None) -> tuple[list[Result], str]:
        """One call for a batch: the result of each rollout, and the end of the printed output.

        Raises:
            CallError: There is not a value for each rollout.
        """
        signature = self.callee.signature
        answer = await self.callee.call(arguments_for(signature, rollouts, self.args), session=session)
        values = answer.values
        if not isinstance(values, list) or len(values) != len(rollouts):
            got = len(values) if isinstance(values, list) else "other"
            text = f"returned {got} values for {len(rollouts)} completions"
            raise CallError("invalid_return", text, error_type="InvalidReturnError", output=answer.output)
        results = [read_value(value, signature.convention) for value in values]
        return with_logged(results, answer.logged_json) if answer.logged_json else results, answer.output


@contextmanager
def counted(function: Function, usage: UsageCounter | None, *, num_answers: int) -> Iterator[None]:
    """Count the block as one call of a function, which is not ended meanwhile.

    The answers of one function may be anything, and must not end the loop that serves the others: every exception
    becomes a failure of the call.

    Args:
        usage: None counts no call, as in a trial.
        num_answers: Rollouts, rows or steps that the call is about.

    Raises:
        CallError: The block raised something.
    """
    code, started, failure = function.code, time.perf_counter(), None
    function.calls_in_flight += 1
    try:
        yield
    except CallError as error:
        failure = error
        raise
    except Exception as error:
        log.exception("call_raised", function=code.name)
        text = f"its answer could not be taken: {type(error).__name__}: {error}"[:500]
        failure = CallError("exception", text)
        raise failure from error
    finally:
        function.calls_in_flight -= 1
        if usage is not None:
            result, seconds = "ok", time.perf_counter() - started
            if failure is not None:
                result = "not_asked" if isinstance(failure, NotAskableError) else failure.kind
                usage.fail(code.name, code.version, result, str(failure), failure.traceback, failure.output)
            metrics.REWARD_CALLS.labels(code.name, result).inc()
            metrics.REWARD_SECONDS.labels(code.name).observe(seconds)
            usage.add(code.name, code.version, answers=num_answers, seconds=seconds)


OnUse: TypeAlias = Callable[[Function], Awaitable[None]]


class UnknownFunctionError(Exception):
    """There is no function of this name and version, or it cannot be loaded; the message says why."""


class Library:
    """Finds functions.

    Args:
        limits: The limits of a call, for a registered function without its own.
        confinement: The level for user code.
        num_workers: Calls of one function that are answered at the same time.
        registry: None if nothing can be registered.
        usage: Counts calls; None counts none.
        step_timeout_s: Wall clock of a step of a registered environment without its own limit; None: as other calls.
        model: Its tokenizer is for functions that name it; None where there is none.

    Attributes:
        configured: The functions of the run's configuration by name, loaded.
        on_use: Awaited with each function that `find` returns; None for nothing.
    """

    def __init__(
        self,
        limits: CallLimits,
        *,
        confinement: ConfinementLevel,
        num_workers: int = 1,
        registry: Registry | OfflineRegistry | None = None,
        usage: UsageCounter | None = None,
        step_timeout_s: float | None = None,
        model: ModelConfig | None = None,
    ) -> None:
        self._read_tokenizer = partial(read_tokenizer_files, model) if model else None
        self.limits, self.confinement, self.usage = limits, confinement, usage
        self._num_workers, self._registry, self._step_timeout_s = num_workers, registry, step_timeout_s
        self.configured: dict[str, Function] = {}
        self.on_use: OnUse | None = None
        self._loaded: OrderedDict[tuple[str, str], Function] = OrderedDict()
        self._loading: dict[tuple[str, str], asyncio.Task[Function]] = {}

    async def find(self, name: str, version: str = "") -> Function:
        """The function, loaded: of the configuration, else the registered one's active version, or `version`.

        Raises:
            UnknownFunctionError: There is none, or it cannot be loaded.
        """
        function = await self._find(name, version)
        if self.on_use is not None:
            await self.on_use(function)
        return function

    async def _find(self, name: str, version: str) -> Function:
        if function := self.configured.get(name):
            if not function.code.version.startswith(version):
                loaded = function.code.version[:12]
                raise UnknownFunctionError(f"version {version[:12]} is asked for and {loaded} is loaded")
            return function
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

    async def load(self, name: str, content: Content) -> Function:
        """A registered version, loaded once for all concurrent callers.

        Raises:
            CallError: It cannot be loaded.
        """
        key = (name, content.version)
        if key in self._loaded:
            self._loaded.move_to_end(key)
            return self._loaded[key]
        if key not in self._loading:
            self._loading[key] = asyncio.create_task(self._load(name, content), name=f"load {name}")
            self._loading[key].add_done_callback(lambda _: self._loading.pop(key, None))
        # The load continues if one of several waiting callers is cancelled.
        function = self._loaded[key] = await asyncio.shield(self._loading[key])
        # The processes of the longest unused functions end, but not of those with in-flight calls.
        idle = [other for other, loaded in self._loaded.items() if not loaded.calls_in_flight and other != key]
        # All leave the list before the first wait: another load may come here meanwhile.
        forgotten = [self._loaded.pop(other) for other in idle[: max(0, len(self._loaded) - MAX_LOADED)]]
        await asyncio.gather(*(oldest.callee.close() for oldest in forgotten))
        return function

    async def _load(self, name: str, content: Content) -> Function:
        # It was admitted under a configuration that allowed more.
        if beyond := self.beyond_limits(content.kind, content.limits):
            raise CallError("forbidden", beyond[0][1])
        code = code_of(name, content)
        function = Function(code, self.sandbox(code, self.limits_of(content)))
        try:
            with counted(function, None, num_answers=0):
                await function.callee.load()
        except CallError:
            await function.callee.close()
            raise
        return function

    def sandbox(
        self,
        code: Code,
        limits: CallLimits,
        sandbox_type: type[Sandbox] = Sandbox,
        *,
        load_timeout_s: float | None = None,
    ) -> Sandbox:
        """A sandbox for a function, of the library's level; nothing is started yet."""
        return sandbox_type(
            code,
            limits,
            self.confinement,
            num_workers=self._num_workers,
            load_timeout_s=load_timeout_s,
            read_tokenizer=self._read_tokenizer,
        )

    def limits_of(self, content: Content) -> CallLimits:
        bounds = self._bounds(content.kind).items()
        return CallLimits(**{name: getattr(content.limits, name) or most for name, (_, most) in bounds})

    def beyond_limits(self, kind: Kind, asked: RequestedLimits) -> list[tuple[str, str]]:
        """The requested limits beyond the configuration's: pairs of field and problem."""
        problems = []
        for name, (key, most) in self._bounds(kind).items():
            value = getattr(asked, name)
            if value is not None and most is not None and value > most:
                text = f"limits.{name}: is {value:g}, and {key} allows {most:g} at most. Ask for less, or raise {key}"
                problems.append((f"limits.{name}", text))
        return problems

    def _bounds(self, kind: Kind) -> dict[str, tuple[str, Any]]:
        """Each limit of a call: the key of the configuration, and its value."""
        timeout = ("reward.timeout_s", self.limits.timeout_s)
        if kind == "environment" and self._step_timeout_s is not None:
            timeout = ("environment.step_timeout_s", self._step_timeout_s)
        limits = {name: (f"reward.{name}", getattr(self.limits, name)) for name in ("memory_mb", "cpu_s")}
        return {"timeout_s": timeout, **limits}

    async def close(self) -> None:
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        functions = [*self.configured.values(), *self._loaded.values()]
        await asyncio.gather(*(function.callee.close() for function in functions))


def code_of(name: str, content: Content) -> Code:
    """A registered version as the sandbox loads it."""
    entry, modules = content.entry or None, content.modules
    return Code(name, content.source, content.version, f"{name}.py", entry, content.kind, modules=modules)
