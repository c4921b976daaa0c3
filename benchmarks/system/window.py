"""Two looks at a running system and what happened between them: busy and idle time, processor time, tokens, pushes.

It reads what the services show anyone: /metrics, heartbeats, events. Neighbour: part_system.py.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from gspo.common.service.redis_client import connect_redis
from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import Keys
from gspo_proto.rollout_pb2 import Event

_ALL_EVENTS = 10_000
# They show no metrics of their own.
REDIS, COMMAND_LINE = "redis", "gspo run"


@dataclass(frozen=True)
class CounterSnapshot:
    """Counters at one moment; `activity` is service -> (kind, what) -> seconds."""

    unix_s: float
    activity: Mapping[str, Mapping[tuple[str, str], float]]
    processor_s: Mapping[str, float]
    machine_idle_s: float
    tokens_generated: float
    events: tuple[Event, ...]


async def look(redis_url: str, run: str, command_line: int) -> CounterSnapshot:
    """All counters of a run now; `command_line` is the process id of its `gspo run`."""
    redis, keys = connect_redis(redis_url), Keys(run)
    try:
        found = await list_instances(redis, keys)
        events = await Events(redis, keys, "benchmark").read(FROM_START, 0.001, _ALL_EVENTS)
        times = psutil.cpu_times()
        pages = await _pages(found)
        processor_s = {instance.service: _processor_s(instance.pid) for instance in found}
        processor_s[REDIS] = await _redis_processor_s(redis)
        own = psutil.Process(command_line).cpu_times()
        processor_s[COMMAND_LINE] = own.user + own.system
    finally:
        await redis.aclose()
    activity: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    tokens = 0.0
    for service, page in pages.items():
        for sample in _samples(page):
            if sample.name == "gspo_activity_seconds_total":
                activity[service][sample.labels["kind"], sample.labels["what"]] = sample.value
            elif sample.name == "gspo_tokens_generated_total" and sample.labels["evaluation"] == "no":
                tokens += sample.value
    return CounterSnapshot(
        time.time(), activity, processor_s, times.idle + times.iowait, tokens, tuple(e for _, e in events)
    )


async def _pages(found: list[Instance]) -> dict[str, str]:
    async with httpx.AsyncClient(timeout=10) as client:
        return {instance.service: (await client.get(f"http://{instance.http}/metrics")).text for instance in found}


def _samples(page: str) -> list[Any]:
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]


def _processor_s(pid: int) -> float:
    """Processor time of a process and everything below it."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system
    return total


async def _redis_processor_s(redis: Redis) -> float:
    info: Any = await redis.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


def between(before: CounterSnapshot, after: CounterSnapshot) -> dict[str, Any]:
    """What happened from one look to the next, ready for JSON."""
    window_s = after.unix_s - before.unix_s
    waits = {service: _grown(before.activity.get(service, {}), now) for service, now in after.activity.items()}
    pushes = [event for event in after.events[len(before.events) :] if event.WhichOneof("what") == "version_live"]
    return {
        "window_s": window_s,
        "idle_share": {service: idle_share(grown) for service, grown in waits.items()},
        "activity_s": {
            service: {f"{kind}: {what}": seconds for (kind, what), seconds in grown.items() if seconds > 0}
            for service, grown in waits.items()
        },
        "processor_share": {
            service: (now - before.processor_s.get(service, 0.0)) / window_s
            for service, now in after.processor_s.items()
        },
        "machine_idle_cores": (after.machine_idle_s - before.machine_idle_s) / window_s,
        "tokens_generated": after.tokens_generated - before.tokens_generated,
        "pushes": [
            {"push_s": live.push_s, "stall_s": live.stall_s, "bytes": live.bytes}
            for live in (event.version_live for event in pushes)
        ],
    }


def idle_share(activity: Mapping[tuple[str, str], float]) -> float:
    """Share of the counted time that a service waited."""
    waited = sum(seconds for (kind, _), seconds in activity.items() if kind == "waiting")
    total = sum(activity.values())
    return waited / total if total else 0.0


def _grown(
    before: Mapping[tuple[str, str], float], now: Mapping[tuple[str, str], float]
) -> dict[tuple[str, str], float]:
    return {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}
