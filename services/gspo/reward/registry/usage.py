"""How the calls of each function version went: counts by result, times, the last failure; over all replicas.

Counted here in memory and added to Redis once a second, so that scoring waits for nothing. Times are kept in buckets
whose bounds grow by BUCKET_RATIO, so a percentile is exact to that.
"""

import asyncio
import itertools
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field
from redis.asyncio import Redis

from gspo.reward.registry.sync import PREFIX
from gspo.runlog.function_files import FunctionCalls

BUCKET_RATIO = 1.1
SMALLEST_S = 1e-5
FLUSH_S = 1.0
PERCENTILES = (50, 90, 99)
# Of a function's printed output in the run's log.
MAX_PRINTED_CHARS = 4000
_BUCKET, _ERROR = "bucket:", "error:"


def usage_key(name: str, version: str) -> str:
    """The hash in Redis of one version's calls: counts by result, times by bucket, the last failure."""
    return f"{PREFIX}usage:{name}:{version}"


class LastFailure(BaseModel):
    """The newest failure of a version."""

    unix_s: float
    kind: str
    text: str
    traceback: str = Field(description="Of the function's own code; empty where it did not raise")
    output: str = Field(description="The end of its printed output")


class VersionUsage(BaseModel):
    """Calls of one version since it was first called."""

    name: str
    version: str
    calls: int
    answers: int = Field(description="Rollouts, rows and steps that the calls were about")
    errors: dict[str, int] = Field(description="Failed calls and answers by kind")
    total_s: float
    latency_s: dict[str, float] = Field(description="Of a call: p50, p90, p99, longest; empty before the first")
    last_failure: LastFailure | None


class UsageCounter:
    """Counts calls, and adds them up in Redis.

    Attributes:
        totals: What this process has counted since its start, by name and version.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self.totals: dict[tuple[str, str], FunctionCalls] = {}
        # By name and version: the numbers to add to the fields of the hash in Redis.
        self._counts: defaultdict[tuple[str, str], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._failures: dict[tuple[str, str], LastFailure] = {}

    def add(self, name: str, version: str, *, answers: int, seconds: float) -> None:
        """Count one call, successful or not."""
        counts = self._counts[name, version]
        counts["calls"] += 1
        counts["answers"] += answers
        counts["seconds"] += seconds
        counts[f"{_BUCKET}{bucket_of(seconds)}"] += 1
        total = self._total(name, version)
        total.calls += 1
        total.answers += answers
        total.seconds += seconds

    def fail(self, name: str, version: str, kind: str, text: str, traceback: str = "", output: str = "") -> None:
        """Count one failure, of a call or of one answer in it."""
        self._counts[name, version][f"{_ERROR}{kind}"] += 1
        failure = LastFailure(unix_s=time.time(), kind=kind, text=text, traceback=traceback, output=output)
        self._failures[name, version] = failure
        total = self._total(name, version)
        total.failures[kind] = total.failures.get(kind, 0) + 1
        total.failure = failure.model_dump()

    def keep_output(self, name: str, version: str, output: str) -> None:
        """Keep the end of a call's printed output, for the run's log."""
        if output.strip():
            self._total(name, version).printed = output[-MAX_PRINTED_CHARS:]

    def _total(self, name: str, version: str) -> FunctionCalls:
        return self.totals.setdefault((name, version), FunctionCalls(name, version))

    async def run(self) -> None:
        """Add the counts to Redis every FLUSH_S, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Add the counts since the last time to Redis."""
        counts, failures = dict(self._counts), dict(self._failures)
        self._counts.clear()
        self._failures.clear()
        if not counts:
            return
        async with self._redis.pipeline(transaction=True) as pipe:
            for function, fields in counts.items():
                for field, number in fields.items():
                    pipe.hincrbyfloat(usage_key(*function), field, number)
            for function, failure in failures.items():
                pipe.hset(usage_key(*function), "last_failure", failure.model_dump_json())
            await pipe.execute()

    async def read(self, name: str, version: str) -> VersionUsage:
        """How the calls of one version went, those of other replicas up to FLUSH_S ago."""
        await self.flush()
        stored: Any = await self._redis.hgetall(usage_key(name, version))
        fields: dict[str, str] = {field.decode(): value.decode() for field, value in stored.items()}
        failure = fields.get("last_failure")
        return VersionUsage(
            name=name,
            version=version,
            calls=int(fields.get("calls", 0)),
            answers=int(fields.get("answers", 0)),
            errors=_counts_of(_ERROR, fields),
            total_s=float(fields.get("seconds", 0)),
            latency_s=percentiles({int(bucket): count for bucket, count in _counts_of(_BUCKET, fields).items()}),
            last_failure=LastFailure.model_validate_json(failure) if failure else None,
        )


def _counts_of(prefix: str, fields: Mapping[str, str]) -> dict[str, int]:
    return {field.removeprefix(prefix): int(count) for field, count in fields.items() if field.startswith(prefix)}


def bucket_of(seconds: float) -> int:
    """The bucket of a time: it is below SMALLEST_S * BUCKET_RATIO ** bucket."""
    return max(0, math.ceil(math.log(max(seconds, SMALLEST_S) / SMALLEST_S, BUCKET_RATIO)))


def percentiles(buckets: Mapping[int, int]) -> dict[str, float]:
    """p50, p90, p99 and the longest, each as the upper bound of its bucket."""
    if not buckets:
        return {}
    shortest_first = sorted(buckets)
    ranks = list(itertools.accumulate(buckets[bucket] for bucket in shortest_first))
    places = {f"p{percent}": bisect_left(ranks, math.ceil(ranks[-1] * percent / 100)) for percent in PERCENTILES}
    return {
        name: SMALLEST_S * BUCKET_RATIO ** shortest_first[place] for name, place in {**places, "longest": -1}.items()
    }
