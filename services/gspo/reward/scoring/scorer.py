"""Scores rollouts: calls the functions that a rollout names and sums their weighted values.

The stream's consumer and the gRPC servicer both score here.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from gspo.common.config.environment import ENVIRONMENT_PART, EnvironmentConfig
from gspo.common.config.reward import RewardConfig
from gspo.reward.functions.arguments import arguments_for
from gspo.reward.functions.configured import open_library
from gspo.reward.functions.library import Function, Library, UnknownFunctionError, counted
from gspo.reward.registry.disk import OfflineRegistry
from gspo.reward.registry.store import Registry
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.calls import CallError, values_of
from gspo.reward.sandbox.values import Failure, Value, read_value
from gspo_proto.rollout_pb2 import RewardUse, Rollout, Score, ScorePart

# After a batch failed, its answers are tried one at a time, first those of different prompts. If so many of them all
# cost their worker too, the function hangs or dies on every answer, and the rest is not tried.
NUM_PROBES = 4
log = structlog.get_logger()


# A function and the version that a rollout asks for, which may be empty.
FunctionKey = tuple[str, str]


class Scorer:
    """Scores rollouts by the functions of a run.

    Args:
        library: The functions.
        uses: The functions of the run, for a rollout that names none.
        batch_size: Answers in one call, at most.
        name: Name of this process, written into every score.
        session: The default session of `score`: calls of different sessions share no process.
    """

    def __init__(
        self, library: Library, uses: Sequence[RewardUse], *, batch_size: int, name: str, session: str = ""
    ) -> None:
        self.library = library
        self._batch_size, self._name, self._session, self._all = batch_size, name, session, list(uses)

    @property
    def functions(self) -> dict[str, Function]:
        """The functions of the configuration."""
        return self.library.configured

    async def score(self, rollouts: Sequence[Rollout], *, session: str | None = None) -> list[Score]:
        """A score for each rollout, in their order; a rollout that names no function is scored by all of the run's."""
        session = session or self._session
        indices: dict[FunctionKey, list[int]] = {}
        for index, rollout in enumerate(rollouts):
            for use in rollout.rewards or self._all:
                if not _is_episode(use):
                    indices.setdefault((use.name, use.version), []).append(index)
        functions = dict(zip(indices, await asyncio.gather(*(self._find(*key) for key in indices)), strict=True))
        known = {key: function for key, function in functions.items() if isinstance(function, Function)}
        seconds: dict[FunctionKey, float] = {}

        async def values_by(key: FunctionKey) -> dict[int, Value | Failure]:
            began = time.perf_counter()
            values = await self._score_by(known[key], rollouts, indices[key], session)
            seconds[key] = time.perf_counter() - began
            return values

        values = dict(zip(known, await asyncio.gather(*map(values_by, known)), strict=True))
        scores = [self._sum(rollout, index, functions, values) for index, rollout in enumerate(rollouts)]
        for key, took_s in seconds.items():
            for index in indices[key]:
                scores[index].seconds[key[0]] = took_s
        return scores

    async def _find(self, name: str, version: str) -> Function | str:
        """The function, or why there is none."""
        try:
            return await self.library.find(name, version)
        except UnknownFunctionError as error:
            return str(error)

    async def _score_by(
        self, function: Function, rollouts: Sequence[Rollout], indices: list[int], session: str
    ) -> dict[int, Value | Failure]:
        starts = range(0, len(indices), self._batch_size)
        batches = [indices[start : start + self._batch_size] for start in starts]
        values = await asyncio.gather(
            *(self._score_batch(function, [rollouts[i] for i in batch], session) for batch in batches)
        )
        return dict(zip(indices, itertools.chain(*values), strict=True))

    async def _score_batch(self, function: Function, batch: list[Rollout], session: str) -> list[Value | Failure]:
        try:
            return await self._call(function, batch, session)
        except CallError as error:
            if len(batch) == 1:
                return [Failure(str(error), error.kind)]
            return await self._one_at_a_time(function, batch, session)

    async def _one_at_a_time(self, function: Function, batch: list[Rollout], session: str) -> list[Value | Failure]:
        """Find the answers that make a batch fail: the others keep their scores."""
        values: dict[int, Value | Failure] = {}
        ended: list[CallError] = []
        for position, index in enumerate(spread_over_groups(batch)):
            if len(ended) == position == NUM_PROBES:
                ways = {"timeout": "timed out", "exception": "got no answer"}
                how = ways.get(ended[-1].kind, f"ended its process ({ended[-1].kind})")
                reason = f"{how} on a batch of {len(batch)} and on each of {NUM_PROBES} answers alone; not tried"
                return [values.get(i, Failure(reason, ended[-1].kind)) for i in range(len(batch))]
            try:
                (values[index],) = await self._call(function, [batch[index]], session)
            except CallError as error:
                values[index] = Failure(str(error), error.kind)
                ended += [] if error.error_type else [error]
        return [values[i] for i in range(len(batch))]

    async def _call(self, function: Function, batch: list[Rollout], session: str) -> list[Value | Failure]:
        """One call of a function.

        Raises:
            CallError: There is not a value for each rollout.
        """
        usage = self.library.usage
        with counted(function, usage, num_answers=len(batch)):
            signature = function.callee.signature
            question = arguments_for(signature, batch, function.args)
            raw = values_of(await function.callee.call(question, session=session), len(batch))
            values = [read_value(value, signature.convention) for value in raw]
        for value in values:
            if isinstance(value, Failure) and usage is not None:
                usage.fail(function.code.name, function.code.version, value.kind, value.reason, value.traceback)
        return values

    def _sum(
        self,
        rollout: Rollout,
        index: int,
        functions: dict[FunctionKey, Function | str],
        values: dict[FunctionKey, dict[int, Value | Failure]],
    ) -> Score:
        score = Score(scorer=self._name, scored_unix_s=time.time())
        failures, kinds, versions, total = [], [], [], 0.0
        for use in rollout.rewards or self._all:
            value, version = (
                _episode_value(rollout) if _is_episode(use) else _function_value(use, index, functions, values)
            )
            versions += [version] if version else []
            if isinstance(value, Failure):
                failures.append(f"{use.name}: {value.reason}")
                kinds.append(value.kind)
                continue
            parts = _parts(use, value, version)
            score.parts.extend(parts)
            total += sum(part.weight * part.value for part in parts)
        score.version = ",".join(versions)
        if not failures and not math.isfinite(total):
            failures.append("the weighted sum is not finite")
            kinds.append("invalid_return")
        if failures:
            score.failure, score.failure_kind = "; ".join(failures), kinds[0]
        else:
            score.reward = total
        return score


def _function_value(
    use: RewardUse,
    index: int,
    functions: dict[FunctionKey, Function | str],
    values: dict[FunctionKey, dict[int, Value | Failure]],
) -> tuple[Value | Failure, str]:
    """The value of a function for a rollout, and its version; an empty version if there is no such function."""
    function = functions[use.name, use.version]
    if isinstance(function, str):
        return Failure(function, "unknown_function"), ""
    return values[use.name, use.version][index], function.code.version


def _is_episode(use: RewardUse) -> bool:
    """Whether the value is the environment's reward, which the rollout has already."""
    return use.name == ENVIRONMENT_PART


def _episode_value(rollout: Rollout) -> tuple[Value | Failure, str]:
    """The summed step rewards of a rollout's environment, or its failure; and its version."""
    episode = rollout.episode
    if episode.failure_kind:
        return Failure(episode.failure, episode.failure_kind), episode.version
    if not math.isfinite(episode.reward):
        return Failure("the sum of the steps' rewards is not finite", "invalid_return"), episode.version
    return Value(episode.reward), episode.version


def _parts(use: RewardUse, value: Value, version: str) -> list[ScorePart]:
    """`function`, or `function/part` for named parts, each with its weight; extras have weight 0."""
    weights = {name: use.weight * use.part_weights.get(name, 1.0) for name in value.parts}
    parts = [
        ScorePart(name=f"{use.name}/{name}", value=part, weight=weights[name], version=version)
        for name, part in value.parts.items()
    ] or [ScorePart(name=use.name, value=value.reward, weight=use.weight, version=version)]
    return parts + [
        ScorePart(name=f"{use.name}/{name}", value=part, weight=0, version=version)
        for name, part in value.extras.items()
    ]


def spread_over_groups(batch: Sequence[Rollout]) -> list[int]:
    """Indices of a batch: the first rollout of every group, then the second of every group, and so on."""
    seen: Counter[int] = Counter()
    places = []
    for index, rollout in enumerate(batch):
        places.append((seen[rollout.group], index))
        seen[rollout.group] += 1
    return [index for _, index in sorted(places)]


@asynccontextmanager
async def open_scorer(
    config: RewardConfig,
    *,
    name: str,
    environment: EnvironmentConfig | None = None,
    session: str = "",
    registry: Registry | OfflineRegistry | None = None,
    usage: UsageCounter | None = None,
) -> AsyncIterator[Scorer]:
    """A scorer with every function of the configuration loaded, and its environment.

    Raises:
        InputError: A file cannot be read or loaded, or holds no function that can be called; or the machine supports
            less confinement than reward.sandbox_minimum.
    """
    async with open_library(config, environment=environment, registry=registry, usage=usage) as library:
        yield Scorer(library, uses_of(config, environment), batch_size=config.batch_size, name=name, session=session)


def uses_of(config: RewardConfig, environment: EnvironmentConfig | None = None) -> list[RewardUse]:
    """The functions of a configuration as a rollout would name them, and its environment."""
    functions = [
        RewardUse(
            name=function.label,
            version=function.version or "",
            weight=function.weight,
            part_weights=function.part_weights,
        )
        for function in config.functions
    ]
    if environment is None or not environment.used:
        return functions
    return [*functions, RewardUse(name=ENVIRONMENT_PART, weight=environment.weight)]
