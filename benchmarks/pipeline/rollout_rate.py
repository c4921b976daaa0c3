"""Part Q, pipeline: rollouts a second through all services with an engine and a step that take no time, and memory."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.measurement import Measurement
from benchmarks.pipeline import bare_redis, simulated_run

TOKENS = 1000
_ROLLOUTS, _LONG_ROLLOUTS, _ENTRIES = 40_000, 200_000, 20_000


def cases(*, quick: bool) -> Iterator[Measurement]:
    """The rate with one replica of each and two, Redis alone, and memory over many rollouts."""
    yield Measurement("redis alone", bare_redis.measure, (TOKENS, 2000 if quick else _ENTRIES))
    for replicas, num in ((2, _ROLLOUTS), (1, _LONG_ROLLOUTS)):
        yield Measurement(f"{replicas} replica(s)", simulated_run.measure, (replicas, 4096 if quick else num, TOKENS))
