"""Scores rollouts: calls the functions that a rollout names and sums their weighted values.

The stream's consumer and the gRPC servicer both score here.
"""

import asyncio
import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from gspo.common.config.reward import RewardConfig
from gspo.common.config.schema import ModelConfig
from gspo.common.config.sources import Source
from gspo.common.reward_uses import EPISODE_PARTS, reward_uses
from gspo.common.score_numbers import number_fault
from gspo.reward.functions.configured import open_library
from gspo.reward.functions.library import Function, Library, OnUse, UnknownFunctionError, counted
from gspo.reward.registry.store import OfflineRegistry, Registry
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.calls import CallError
from gspo.reward.sandbox.values import Failure, Result, Value
from gspo_proto.rollout_pb2 import Episode, RewardUse, Rollout, Score, ScorePart

# After a batch failed, its answers are tried one at a time, first those of different prompts. If so many of them all
# cost their worker too, the function hangs or dies on every answer, and the rest is not tried.
NUM_PROBES = 4
# A function and the version that a rollout asks for, which may be empty.
FunctionKey = tuple[str, str]
# Of each function that does not apply to an answer, where no other one does.
NOT_SCORED = "returned None, and no function scored the answer"


class _Results(NamedTuple):
    """The values of one function, by the index of each rollout that asks for it.

    Attributes:
        version: Empty if there is no such function.
        seconds: From its first call to its last answer.
    """

    values: dict[int, Result]
    version: str = ""
    seconds: float = 0.0


class Scorer:
    """Scores rollouts by the functions of a run.

    Args:
        library: The functions.
        uses: The functions for a rollout that names none.
        batch_size: Answers in one call, at most.
        name: Name of this process, written into every score.
        session: The default session of `score`: calls of different sessions share no process.
    """

    def __init__(
        self, library: Library, uses: Sequence[RewardUse], *, batch_size: int, name: str, session: str = ""
    ) -> None:
        self.library = library
        self._batch_size, self._name, self._session, self._all = batch_size, name, session, list(uses)

    async def score(self, rollouts: Sequence[Rollout], *, session: str | None = None) -> list[Score]:
        """A score for each rollout, in their order; one that names no function is scored by the default ones."""
        session = session or self._session
        indices: defaultdict[FunctionKey, list[int]] = defaultdict(list)
        for index, rollout in enumerate(rollouts):
            for use in rollout.rewards or self._all:
                if use.name not in EPISODE_PARTS:
                    indices[use.name, use.version].append(index)
        calls = (self._results_of(key, rollouts, own, session) for key, own in indices.items())
        results = dict(zip(indices, await asyncio.gather(*calls), strict=True))
        return [self._sum(rollout, index, results) for index, rollout in enumerate(rollouts)]

    async def _results_of(
        self, key: FunctionKey, rollouts: Sequence[Rollout], indices: list[int], session: str
    ) -> _Results:
        try:
            function = await self.library.find(*key)
        except UnknownFunctionError as error:
            return _Results(dict.fromkeys(indices, Failure(str(error), "unknown_function")))
        began, size = time.perf_counter(), self._batch_size
        batches = [[rollouts[i] for i in indices[start : start + size]] for start in range(0, len(indices), size)]
        values = await asyncio.gather(*(self._score_batch(function, batch, session) for batch in batches))
        by_index = dict(zip(indices, itertools.chain(*values), strict=True))
        return _Results(by_index, function.code.version, time.perf_counter() - began)

    async def _score_batch(self, function: Function, batch: list[Rollout], session: str) -> list[Result]:
        try:
            return await self._call(function, batch, session)
        except CallError as error:
            if len(batch) == 1:
                return [Failure(str(error), error.kind)]
            return await self._one_at_a_time(function, batch, session)

    async def _one_at_a_time(self, function: Function, batch: list[Rollout], session: str) -> list[Result]:
        """Find the answers that make a batch fail: the others keep their scores."""
        values: dict[int, Result] = {}
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

    async def _call(self, function: Function, batch: list[Rollout], session: str) -> list[Result]:
        """One call of a function.

        Raises:
            CallError: There is not a value for each rollout.
        """
        usage = self.library.usage
        with counted(function, usage, num_answers=len(batch)):
            values, output = await function.score(batch, session=session)
        if usage is not None:
            usage.keep_output(function.code.name, function.code.version, output)
        for value in values:
            if isinstance(value, Failure) and usage is not None:
                usage.fail(function.code.name, function.code.version, value.kind, value.reason, value.traceback)
        return values

    def _sum(self, rollout: Rollout, index: int, results: Mapping[FunctionKey, _Results]) -> Score:
        score = Score(scorer=self._name, scored_unix_s=time.time())
        failures, kinds, versions, total = [], [], [], 0.0
        not_applied: list[str] = []
        logged: dict[str, Any] = {}
        value: Result
        for use in rollout.rewards or self._all:
            if use.name in EPISODE_PARTS:
                value, version = _episode_value(rollout.episode), rollout.episode.version
            else:
                result = results[use.name, use.version]
                value, version = result.values[index], result.version
                if version:
                    score.seconds[use.name] = result.seconds
            versions += [version] if version else []
            if value is None:
                not_applied.append(f"{use.name}: {NOT_SCORED}")
                continue
            if isinstance(value, Failure):
                failures.append(f"{use.name}: {value.reason}")
                kinds.append(value.kind)
                continue
            logged |= {f"{use.name}/{name}": column for name, column in value.columns.items()}
            parts = parts_of(use, value, version)
            score.parts.extend(parts)
            total += sum(part.weight * part.value for part in parts)
        score.version = ",".join(versions)
        score.logged_json = json.dumps(logged, ensure_ascii=False) if logged else ""
        if not_applied and not failures and not score.parts:
            failures, kinds = not_applied, ["invalid_return"]
        if not failures and (fault := number_fault(total)):
            failures.append(f"the weighted sum is {fault}")
            kinds.append("invalid_return")
        if failures:
            score.failure, score.failure_kind = "; ".join(failures), kinds[0]
        else:
            score.reward = total
        return score


def _episode_value(episode: Episode) -> Value | Failure:
    """The reward of an environment's steps or of an agent, which the rollout has already; or their failure."""
    if episode.failure_kind:
        return Failure(episode.failure, episode.failure_kind)
    if fault := number_fault(episode.reward):
        return Failure(f"the sum of the steps' rewards is {fault}", "invalid_return")
    return Value(episode.reward)


def parts_of(use: RewardUse, value: Value, version: str) -> list[ScorePart]:
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
    sources: Sequence[Source] = (),
    session: str = "",
    registry: Registry | OfflineRegistry | None = None,
    usage: UsageCounter | None = None,
    on_use: OnUse | None = None,
    model: ModelConfig | None = None,
) -> AsyncIterator[Scorer]:
    """A scorer with the functions and environments of the sources loaded.

    Args:
        sources: One with the functions of `config` alone by default; the first scores a rollout that names no function.
        on_use: Awaited before a function scores.
        model: The policy's, for functions that name its tokenizer.

    Raises:
        InputError: A file cannot be read or loaded, or holds no function that can be called; or the machine supports
            less confinement than reward.sandbox_minimum.
    """
    first = sources[0] if sources else Source(functions=config.functions)
    async with open_library(config, sources=sources, registry=registry, usage=usage, model=model) as library:
        library.on_use = on_use
        yield Scorer(library, reward_uses(first), batch_size=config.batch_size, name=name, session=session)
