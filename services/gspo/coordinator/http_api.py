"""The run's HTTP API: its state, its newest rollouts, pause, resume and stop."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel, ConfigDict, Field
from redis.asyncio import Redis

from gspo.common.config.sources import Source
from gspo.common.service.app import Service
from gspo.common.source_order import SourceOrder
from gspo.common.streams.entries import word_of
from gspo.common.streams.events import Events
from gspo.common.streams.instances import Instance, list_instances
from gspo.common.streams.keys import GENERATION, PAUSED_BY_USER, Keys
from gspo.common.telemetry.advice import findings, verdict
from gspo.common.telemetry.findings import Finding, RecentSteps
from gspo.common.telemetry.step_time import seconds_by_function, shares
from gspo.coordinator.evaluation.scheduler import EvaluationScheduler
from gspo.coordinator.loop import Coordinator
from gspo.coordinator.redis_state import newest_entries, readable
from gspo_proto.rollout_pb2 import Event, Outcome, Scored, ScoredRollout, StopRequested

# Entries leave `scored` when their step is logged, so the newest are kept here for later readers.
_REFRESH_S = 2.0
_REFRESH_COUNT = 8
_KEPT = 256


class StopBody(BaseModel):
    """Why the run is stopped."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field("stopped by a user", min_length=1, max_length=500)


class RunViews:
    """The answers of the HTTP API: about the startup at first, then about the run or the evaluation.

    Attributes:
        coordinator: That of a run with a learner; None before it starts, and for an evaluation alone.
        scheduler: The evaluations; None while the process starts.
        checks: What the start found.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._redis, self._keys = service, service.redis, service.keys
        self.coordinator: Coordinator | None = None
        self.scheduler: EvaluationScheduler | None = None
        self.checks: list[Finding] = []

    async def state(self) -> dict[str, Any]:
        """Step, versions, slots, groups by settlement, evaluations, registered instances."""
        if self.scheduler is None:
            return {"run": self._keys.run, "starting": self._service.activity.detail}
        return {
            "run": self._keys.run,
            **(_state_of(self.coordinator) if self.coordinator else {"version": 0}),
            "evaluation_under_way": self.scheduler.describe(),
            "evaluations": [asdict(record) for record in self.scheduler.records],
            "members": [asdict(instance) for instance in await list_instances(self._redis, self._keys)],
        }

    async def status(self) -> dict[str, Any]:
        """The activity of every instance, the last step's time by cause, and the verdicts on the last steps.

        Before the first step, `last_step` and `bound` are null.
        """
        recent = self.coordinator.recent if self.coordinator else RecentSteps()
        steps = list(recent.steps)
        instances, now = await list_instances(self._redis, self._keys), time.time()
        num_generators = sum(instance.service == GENERATION for instance in instances)
        bound = verdict(steps, self._service.config, num_generators)
        return {
            "run": self._keys.run,
            "services": [_activity_row(instance, now) for instance in instances],
            "findings": [
                asdict(finding) for finding in (*self.checks, *findings(recent.judged(), self._service.config).values())
            ],
            "last_step": _last_step(steps[-1]) if steps else None,
            "bound": bound and {key: value for key, value in asdict(bound).items() if key != "shares"},
        }


def _state_of(coordinator: Coordinator) -> dict[str, Any]:
    slots, ending = coordinator.slots, coordinator.ending
    what, detail = coordinator.waits_for()
    return {
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
        "curriculum": coordinator.curriculum(),
        "paused": coordinator.pause.active,
        "paused_because": coordinator.pause.reason,
        "waits_for": f"{what}: {detail}",
        "stopping": ending.stop_reason,
        "training_done": ending.training_reason,
        "ended": {"reason": ending.finished_reason, "failed": ending.failed} if ending.finished else None,
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

    def __init__(self, redis: Redis, keys: Keys, sources: Sequence[Source]) -> None:
        self._redis, self._keys = redis, keys
        self._source_names = [source.name for source in sources]
        self._source_order = SourceOrder([source.weight for source in sources])
        self._seen: dict[bytes, dict[str, Any]] = {}

    async def run(self) -> None:
        """Keep the newest until cancelled."""
        while True:
            await self._refresh(_REFRESH_COUNT)
            await asyncio.sleep(_REFRESH_S)

    async def newest(self, limit: Annotated[int, Query(ge=1, le=256)] = 16) -> list[dict[str, Any]]:
        """The newest scored rollouts, the newest first."""
        await self._refresh(limit)
        return list(self._seen.values())[:limit]

    async def _refresh(self, count: int) -> None:
        for entry, scored in readable(Scored, await newest_entries(self._redis, self._keys.scored, count)):
            if entry not in self._seen and scored.HasField("rollout"):
                place = self._source_order.place(scored.rollout.rollout.group)
                self._seen[entry] = _rollout_view(scored.rollout, self._source_names[place.source])
        newest = sorted(self._seen.items(), key=lambda item: [int(part) for part in item[0].split(b"-")], reverse=True)
        self._seen = dict(newest[:_KEPT])


def _rollout_view(scored: ScoredRollout, source: str) -> dict[str, Any]:
    rollout, score = scored.rollout, scored.score
    versions = [version for version in rollout.version if version >= 0]
    return {
        "group": rollout.group,
        "number": rollout.number,
        "attempt": rollout.attempt,
        "source": source,
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


class RunControls:
    """Pauses, continues and stops the run."""

    def __init__(self, service: Service, views: RunViews) -> None:
        self._redis, self._keys, self._views = service.redis, service.keys, views
        self._events = Events(service.redis, service.keys, service.options.name)

    async def pause(self) -> dict[str, bool]:
        """Issue no new groups from this reply on; open groups are finished."""
        await self._redis.set(self._keys.paused, PAUSED_BY_USER)
        await self._apply_at_once()
        return {"paused": True}

    async def resume(self) -> dict[str, bool]:
        """Issue groups again."""
        await self._redis.delete(self._keys.paused)
        await self._apply_at_once()
        return {"paused": False}

    async def _apply_at_once(self) -> None:
        """The coordinator reads the key once a second, and quick steps would issue several batches within it."""
        if self._views.coordinator is not None:
            await self._views.coordinator.pause.refresh()

    async def stop(self, body: StopBody) -> dict[str, str]:
        """End the run after the step in training, with a checkpoint."""
        await self._events.send(Event(stop_requested=StopRequested(reason=body.reason)))
        return {"stopping": body.reason}


def make_http_api(service: Service, views: RunViews, rollouts: RecentRollouts) -> FastAPI:
    """The app; services/gspo/coordinator/page/page_access.py authorizes callers before."""
    app, controls = FastAPIOffline(title="gspo coordinator"), RunControls(service, views)
    app.get("/v1/state")(views.state)
    app.get("/v1/status")(views.status)
    app.get("/v1/rollouts")(rollouts.newest)
    app.post("/v1/pause")(controls.pause)
    app.post("/v1/resume")(controls.resume)
    app.post("/v1/stop", status_code=202)(controls.stop)
    return app
