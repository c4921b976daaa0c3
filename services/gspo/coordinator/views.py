"""The state of the run and its newest rollouts as plain values, for the HTTP API."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis

from gspo.common.config.schema import Config
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import GENERATION, Keys
from gspo.common.streams.messages import word_of
from gspo.common.telemetry.bottleneck import verdict
from gspo.common.telemetry.step_time import seconds_by_function, shares
from gspo.coordinator.evaluation.scheduler import EvaluationScheduler
from gspo.coordinator.loop import Coordinator
from gspo.coordinator.redis_state import newest_entries, readable
from gspo_proto.rollout_pb2 import Outcome, Scored, ScoredRollout

# Entries leave `scored` when their step is logged, so the newest are kept here for later readers.
_REFRESH_S = 2.0
_REFRESH_COUNT = 8
_KEPT = 256


async def run_state(redis: Redis, keys: Keys, coordinator: Coordinator) -> dict[str, Any]:
    """The state of a run with a learner."""
    slots, ending = coordinator.slots, coordinator.ending
    what, detail = coordinator.waits_for()
    return {
        "run": keys.run,
        "epoch": coordinator.feed.epoch,
        # Step s makes version s.
        "step": slots.version,
        "version": slots.version,
        "live_version": slots.live_version,
        "slots": {
            "all": slots.num_slots,
            "taken": slots.num_taken,
            "free": slots.num_free,
            "trained": slots.num_trained,
        },
        "groups": {"issued": slots.num_issued, "open": len(slots.open)} | {k: v for k, v in slots.counts.items() if v},
        "paused": coordinator.pause.active,
        "paused_because": coordinator.pause.reason,
        "waits_for": f"{what}: {detail}",
        "stopping": ending.stop_reason,
        "training_done": ending.training_reason,
        "ended": {"reason": ending.finished_reason, "failed": ending.failed} if ending.finished else None,
    } | await _common_state(redis, keys, coordinator.scheduler)


async def evaluation_state(redis: Redis, keys: Keys, scheduler: EvaluationScheduler) -> dict[str, Any]:
    """The state of a run that is one evaluation."""
    return {"run": keys.run, "version": 0} | await _common_state(redis, keys, scheduler)


async def _common_state(redis: Redis, keys: Keys, scheduler: EvaluationScheduler) -> dict[str, Any]:
    return {
        "evaluation_under_way": scheduler.describe(),
        "evaluations": [asdict(record) for record in scheduler.records],
        "members": [asdict(instance) for instance in await list_instances(redis, keys)],
    }


async def run_status(redis: Redis, keys: Keys, config: Config, steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The activity of every instance, the last step's time by cause, and the verdict on the last steps.

    Args:
        steps: Figures of the newest steps, oldest first; without any, `last_step` and `bound` are null.
    """
    instances, now = await list_instances(redis, keys), time.time()
    num_generators = sum(instance.service == GENERATION for instance in instances)
    bound = verdict(steps, config, num_generators)
    return {
        "run": keys.run,
        "services": [_activity_row(instance, now) for instance in instances],
        "last_step": _last_step(steps[-1]) if steps else None,
        "bound": bound and {key: value for key, value in asdict(bound).items() if key != "shares"},
    }


def _activity_row(instance: Instance, now: float) -> dict[str, Any]:
    activity = instance.activity
    since = float(activity.get("since_unix_s", now))
    return {
        "service": instance.service,
        "name": instance.name,
        **{key: activity.get(key, "") for key in ("kind", "what", "detail")},
        "since_unix_s": since,
        "for_s": max(0.0, now - since),
    }


def _last_step(figures: Mapping[str, float]) -> dict[str, Any]:
    by_cause = shares(figures)
    return {
        "seconds": sum(share.seconds for share in by_cause),
        "by_cause": [asdict(share) | {"in_words": share.in_words} for share in by_cause],
        "rewards_by_function": seconds_by_function(figures),
    }


class RecentRollouts:
    """The newest scored rollouts of training; a sample of them where they are scored quickly."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._seen: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    async def run(self) -> None:
        """Keep the newest until cancelled."""
        while True:
            await self._refresh(_REFRESH_COUNT)
            await asyncio.sleep(_REFRESH_S)

    async def newest(self, limit: int) -> list[dict[str, Any]]:
        """The newest `limit`, the newest first."""
        await self._refresh(limit)
        newest = sorted(self._seen.items(), key=lambda item: _position(item[0]), reverse=True)
        return [shown for _, shown in newest[:limit]]

    async def _refresh(self, count: int) -> None:
        for entry, scored in readable(Scored, await newest_entries(self._redis, self._keys.scored, count)):
            if entry not in self._seen and scored.HasField("rollout"):
                self._seen[entry] = _rollout_view(scored.rollout)
        while len(self._seen) > _KEPT:
            self._seen.popitem(last=False)


def _position(entry: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in entry.split(b"-"))


def _rollout_view(scored: ScoredRollout) -> dict[str, Any]:
    rollout, score = scored.rollout, scored.score
    versions = [version for version in rollout.version if version >= 0]
    return {
        "group": rollout.group,
        "number": rollout.number,
        "attempt": rollout.attempt,
        "prompt": rollout.prompt.text,
        "columns": json.loads(rollout.prompt.columns_json or "{}"),
        "text": rollout.text,
        "outcome": word_of(Outcome, rollout.outcome),
        "num_tokens": sum(rollout.mask),
        "version_first": min(versions, default=None),
        "version_last": max(versions, default=None),
        "reward": score.reward if score.HasField("reward") else None,
        "failure": score.failure if score.HasField("failure") else None,
        "parts": {part.name: part.value for part in score.parts},
        "generator": rollout.generator,
        "scored_unix_s": score.scored_unix_s,
    }
