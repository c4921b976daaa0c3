"""Two looks at a running system, and the difference: busy and idle time, processor time, tokens, pushes.

It reads the public figures of the services: /metrics, heartbeats, events.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.child_process import processor_s
from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.instances import list_instances
from gspo.common.streams.keys import Keys
from gspo.common.streams.redis_client import connect_redis
from gspo_proto.rollout_pb2 import Event

_ALL_EVENTS = 10_000
# They show no metrics of their own.
REDIS, COMMAND_LINE = "redis", "gspo run"


@dataclass(frozen=True)
class CounterSnapshot:
    """Counters at one moment; `activity` is service -> (kind, reason) -> seconds."""

    unix_s: float
    activity: Mapping[str, Mapping[tuple[str, str], float]]
    processor_s: Mapping[str, float]
    machine_idle_s: float
    tokens_generated: float
    events: tuple[Event, ...]


async def look(redis_url: str, run: str, command_line: int) -> CounterSnapshot:
    """All counters of a run now; `command_line` is the process id of its `gspo run`."""
    redis, keys = connect_redis(redis_url), Keys(run)
    activity: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    used_s: dict[str, float] = {}
    tokens = 0.0
    try:
        events = await Events(redis, keys, "benchmark").read(FROM_START, 0.001, _ALL_EVENTS)
        times = psutil.cpu_times()
        async with httpx.AsyncClient(timeout=10) as client:
            for instance in await list_instances(redis, keys):
                used_s[instance.service] = processor_s(instance.pid)
                page = (await client.get(f"http://{instance.http}/metrics")).text
                for sample in (sample for family in text_string_to_metric_families(page) for sample in family.samples):
                    if sample.name == "gspo_activity_seconds_total":
                        activity[instance.service][sample.labels["kind"], sample.labels["what"]] = sample.value
                    elif sample.name == "gspo_tokens_generated_total" and sample.labels["evaluation"] == "no":
                        tokens += sample.value
        info: Any = await redis.info("cpu")
    finally:
        await redis.aclose()
    used_s[REDIS] = float(info["used_cpu_user"] + info["used_cpu_sys"])
    own = psutil.Process(command_line).cpu_times()
    used_s[COMMAND_LINE] = own.user + own.system
    return CounterSnapshot(
        time.time(), activity, used_s, times.idle + times.iowait, tokens, tuple(event for _, event in events)
    )


def between(before: CounterSnapshot, after: CounterSnapshot) -> dict[str, Any]:
    """The differences from one look to the next, ready for JSON."""
    window_s = after.unix_s - before.unix_s
    spent = {
        service: {kind: seconds - before.activity.get(service, {}).get(kind, 0.0) for kind, seconds in now.items()}
        for service, now in after.activity.items()
    }
    pushes = [event for event in after.events[len(before.events) :] if event.WhichOneof("what") == "version_live"]
    return {
        "window_s": window_s,
        "idle_share": {service: idle_share(grown) for service, grown in spent.items()},
        "activity_s": {
            service: {f"{kind}: {what}": seconds for (kind, what), seconds in grown.items() if seconds > 0}
            for service, grown in spent.items()
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
