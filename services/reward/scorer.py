"""Rollouts in, scores out: calls the functions that a rollout asks for and sums their weighted values.

The stream, the gRPC door and the check all score here. It knows no Redis. Neighbours: sandbox.py runs a function,
values.py reads what it returned, worker.py feeds it from the streams.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from gspo_proto.rollout_pb2 import RewardUse, Rollout, Score, ScorePart
from services.common import metrics
from services.common.config import RewardConfig
from services.common.errors import InputError
from services.reward.calls import CallFailed, Limits
from services.reward.functions import Source, Unaskable, arguments_for, read_sources
from services.reward.levels import Found, find_level
from services.reward.sandbox import Sandbox
from services.reward.values import Failure, Value, read_value

# After a batch failed, its answers are tried one at a time. When the first so many, of as many prompts as there are,
# cost their worker too, the function hangs or dies on everything: trying the rest would cost as much each.
NUM_PROBES = 4
log = structlog.get_logger()


@dataclass(frozen=True)
class Function:
    """A reward function of the run and the sandbox that has it loaded."""

    source: Source
    sandbox: Sandbox


class Scorer:
    """Scores rollouts by the functions of a run.

    Args:
        functions: The functions, loaded.
        batch_size: Answers in one call, at most.
        name: Name of this process, written into every score.
        session: Whose calls these are, where score is not told: other sessions' calls share no process with them.
        containment: How user code is contained.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        batch_size: int,
        name: str,
        session: str = "",
        containment: Found | None = None,
    ) -> None:
        self.containment = containment
        self.functions = {function.source.name: function for function in functions}
        self._batch_size, self._name, self._session = batch_size, name, session
        self._all = [RewardUse(name=one.source.name, weight=one.source.weight) for one in functions]

    async def score(self, rollouts: Sequence[Rollout], *, session: str | None = None) -> list[Score]:
        """A score for each rollout, in their order; a rollout that names no function is scored by all of them."""
        session = session or self._session
        wanted: dict[str, list[int]] = {}
        for index, rollout in enumerate(rollouts):
            for use in rollout.rewards or self._all:
                if self._unknown(use) is None:
                    wanted.setdefault(use.name, []).append(index)
        found = await asyncio.gather(*(self._score_by(name, rollouts, wanted[name], session) for name in wanted))
        results = dict(zip(wanted, found, strict=True))
        return [self._sum(rollout, index, results) for index, rollout in enumerate(rollouts)]

    def _unknown(self, use: RewardUse) -> str | None:
        """Why this process cannot score by `use`, if it cannot."""
        if use.name not in self.functions:
            return f"there is no reward function of this name; there are {', '.join(self.functions)}"
        version = self.functions[use.name].source.version
        if use.version not in ("", version):
            return f"version {use.version[:12]} is asked for and {version[:12]} is loaded"
        return None

    async def _score_by(
        self, name: str, rollouts: Sequence[Rollout], indices: list[int], session: str
    ) -> dict[int, Value | Failure]:
        starts = range(0, len(indices), self._batch_size)
        batches = [indices[start : start + self._batch_size] for start in starts]
        found = await asyncio.gather(
            *(self._score_batch(name, [rollouts[i] for i in batch], session) for batch in batches)
        )
        return dict(zip(indices, itertools.chain(*found), strict=True))

    async def _score_batch(self, name: str, batch: list[Rollout], session: str) -> list[Value | Failure]:
        try:
            return await self._call(name, batch, session)
        except CallFailed as error:
            if len(batch) == 1:
                return [Failure(str(error), error.kind)]
            return await self._one_at_a_time(name, batch, session)

    async def _one_at_a_time(self, name: str, batch: list[Rollout], session: str) -> list[Value | Failure]:
        """Find the answers that make a batch fail: the others keep their scores."""
        values: dict[int, Value | Failure] = {}
        ended: list[CallFailed] = []
        for position, index in enumerate(spread_over_groups(batch)):
            if len(ended) == position == NUM_PROBES:
                how = "timed out" if ended[-1].kind == "timeout" else f"ended its process ({ended[-1].kind})"
                reason = f"{how} on a batch of {len(batch)} and on each of {NUM_PROBES} answers alone; not tried"
                return [values.get(i, Failure(reason, ended[-1].kind)) for i in range(len(batch))]
            try:
                (values[index],) = await self._call(name, [batch[index]], session)
            except CallFailed as error:
                values[index] = Failure(str(error), error.kind)
                ended += [] if error.error_type else [error]
        return [values[i] for i in range(len(batch))]

    async def _call(self, name: str, batch: list[Rollout], session: str) -> list[Value | Failure]:
        """One call of a function.

        Raises:
            CallFailed: There is not a value for each rollout.
        """
        sandbox, result, started = self.functions[name].sandbox, "ok", time.perf_counter()
        try:
            raw = (await sandbox.call(arguments_for(sandbox.signature, batch), session=session)).values
            if not isinstance(raw, list) or len(raw) != len(batch):
                got = len(raw) if isinstance(raw, list) else "other"
                text = f"returned {got} values for {len(batch)} completions"
                raise CallFailed("invalid_return", text, error_type="InvalidReturn")
        except Unaskable as error:
            result = "not_asked"
            raise CallFailed("exception", str(error), error_type="Unaskable") from error
        except CallFailed as error:
            result = error.kind
            raise
        finally:
            metrics.REWARD_CALLS.labels(name, result).inc()
            metrics.REWARD_SECONDS.labels(name).observe(time.perf_counter() - started)
        return [read_value(value, sandbox.signature.convention) for value in raw]

    def _sum(self, rollout: Rollout, index: int, results: dict[str, dict[int, Value | Failure]]) -> Score:
        score = Score(scorer=self._name, scored_unix_s=time.time())
        failures, kinds, versions, total = [], [], [], 0.0
        for use in rollout.rewards or self._all:
            if (why := self._unknown(use)) is not None:
                failures.append(f"{use.name}: {why}")
                kinds.append("unknown_function")
                continue
            version = self.functions[use.name].source.version
            versions.append(version)
            value = results[use.name][index]
            if isinstance(value, Failure):
                failures.append(f"{use.name}: {value.reason}")
                kinds.append(value.kind)
                continue
            score.parts.extend(_parts(use, value, version))
            total += use.weight * value.reward
        score.version = ",".join(versions)
        if not failures and not math.isfinite(total):
            failures.append("the weighted sum is not finite")
            kinds.append("invalid_return")
        if failures:
            score.failure, score.failure_kind = "; ".join(failures), kinds[0]
        else:
            score.reward = total
        return score


def _parts(use: RewardUse, value: Value, version: str) -> list[ScorePart]:
    """`function`, or `function/part` for named parts; what does not count has weight 0."""
    counted = {f"{use.name}/{name}": part for name, part in value.parts.items()} or {use.name: value.reward}
    parts = [ScorePart(name=name, value=part, weight=use.weight, version=version) for name, part in counted.items()]
    extras = value.extras.items()
    return parts + [
        ScorePart(name=f"{use.name}/{name}", value=part, weight=0, version=version) for name, part in extras
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
async def open_scorer(config: RewardConfig, *, name: str, session: str = "") -> AsyncIterator[Scorer]:
    """A scorer with every function of the configuration loaded in a sandbox of its own.

    Raises:
        InputError: A file cannot be read or loaded, or holds no function that can be called; or the machine gives less
            containment than reward.sandbox_minimum.
    """
    sources = read_sources(config)
    found = await find_level(config.sandbox_minimum)
    limits = Limits(config.timeout_s, config.memory_mb, config.cpu_s)
    functions = [
        Function(source, Sandbox(source.code, limits, found.level, num_workers=config.workers)) for source in sources
    ]
    try:
        for index, function in enumerate(functions):
            try:
                await function.sandbox.load()
            except CallFailed as error:
                where = f"reward.functions.{index}"
                raise InputError(where, f"{function.source.path} {error}", _how_to_mend(error)) from error
        yield Scorer(functions, batch_size=config.batch_size, name=name, session=session, containment=found)
    finally:
        await asyncio.gather(*(function.sandbox.close() for function in functions))


def _how_to_mend(error: CallFailed) -> str:
    if "several" in str(error):
        return "Name one with `entry:`, or list the file once for each with `name:` and `entry:`"
    if error.error_type == "Unfit":
        return "Define reward(prompts, completions, **columns) or verl's compute_score, or name the function: `entry:`"
    if error.error_type == "MemoryError":
        return "Raise reward.memory_mb"
    return "Mend the file; it must load in the Python of this service"
