"""How the calls of each function version went: counts by result, times, the last failure; over all replicas.

Counted here in memory and added to Redis once a second, so that scoring waits for nothing. Times are kept in buckets
whose bounds grow by BUCKET_RATIO, so a percentile is exact to that.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from typing import Any

from pydantic import BaseModel, Field
from redis.asyncio import Redis

from gspo.reward.registry.keys import RegistryKeys

BUCKET_RATIO = 1.1
SMALLEST_S = 1e-5
FLUSH_S = 1.0
PERCENTILES = (50, 90, 99)
_BUCKET, _ERROR = "bucket:", "error:"


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
    """Counts calls, and adds them up in Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis, self._keys = redis, RegistryKeys()
        self._counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._failures: dict[tuple[str, str], LastFailure] = {}

    def add(self, name: str, version: str, *, answers: int, seconds: float) -> None:
        """Count one call, successful or not."""
        counts = self._counts[name, version]
        counts["calls"] += 1
        counts["answers"] += answers
        counts[f"{_BUCKET}{bucket_of(seconds)}"] += 1
        self._seconds[name, version] += seconds

    def fail(self, name: str, version: str, kind: str, text: str, traceback: str = "", output: str = "") -> None:
        """Count one failure, of a call or of one answer in it."""
        self._counts[name, version][f"{_ERROR}{kind}"] += 1
        self._failures[name, version] = LastFailure(
            unix_s=time.time(), kind=kind, text=text, traceback=traceback, output=output
        )

    async def run(self) -> None:
        """Add the counts to Redis every FLUSH_S, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Add the counts since the last time to Redis."""
        counts, self._counts = self._counts, defaultdict(Counter)
        seconds, self._seconds = self._seconds, defaultdict(float)
        failures, self._failures = self._failures, {}
        if not counts:
            return
        async with self._redis.pipeline(transaction=True) as pipe:
            for (name, version), fields in counts.items():
                key = self._keys.usage(name, version)
                for field, number in fields.items():
                    pipe.hincrby(key, field, number)
                pipe.hincrbyfloat(key, "seconds", seconds[name, version])
                if (name, version) in failures:
                    pipe.hset(key, "last_failure", failures[name, version].model_dump_json())
            await pipe.execute()

    async def read(self, name: str, version: str) -> VersionUsage:
        """How the calls of one version went, those of other replicas up to FLUSH_S ago."""
        await self.flush()
        fields: Any = await self._redis.hgetall(self._keys.usage(name, version))
        return summarise(name, version, {field.decode(): value.decode() for field, value in fields.items()})


def bucket_of(seconds: float) -> int:
    """The bucket of a time: it is below SMALLEST_S * BUCKET_RATIO ** bucket."""
    return max(0, math.ceil(math.log(max(seconds, SMALLEST_S) / SMALLEST_S, BUCKET_RATIO)))


def summarise(name: str, version: str, fields: dict[str, str]) -> VersionUsage:
    """The usage of one version from its hash in Redis."""
    buckets = {int(field[len(_BUCKET) :]): int(count) for field, count in fields.items() if field.startswith(_BUCKET)}
    failure = fields.get("last_failure")
    return VersionUsage(
        name=name,
        version=version,
        calls=int(fields.get("calls", 0)),
        answers=int(fields.get("answers", 0)),
        errors={field[len(_ERROR) :]: int(count) for field, count in fields.items() if field.startswith(_ERROR)},
        total_s=float(fields.get("seconds", 0)),
        latency_s=percentiles(buckets),
        last_failure=LastFailure.model_validate(json.loads(failure)) if failure else None,
    )


def percentiles(buckets: dict[int, int]) -> dict[str, float]:
    """p50, p90, p99 and the longest, each as the upper bound of its bucket."""
    if not buckets:
        return {}
    total, times_s = sum(buckets.values()), {}
    for percent in PERCENTILES:
        remaining = math.ceil(total * percent / 100)
        for bucket in sorted(buckets):
            remaining -= buckets[bucket]
            if remaining <= 0:
                times_s[f"p{percent}"] = SMALLEST_S * BUCKET_RATIO**bucket
                break
    return {**times_s, "longest": SMALLEST_S * BUCKET_RATIO ** max(buckets)}
