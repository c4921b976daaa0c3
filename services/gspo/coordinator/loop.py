"""The coordinator's loop: keeps the slots full, measures the policy in between, and ends the run.

Consumes events; produces tasks, evaluations, Finished. Waits for slots, unblocked by VersionLive and GroupsSettled;
for answers, unblocked by generation and reward; at the end for the last version, unblocked by VersionLive.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

import structlog

from gspo.common.service.app import Service
from gspo.common.streams.events import FROM_START, Events
from gspo.common.streams.keys import PAUSED_BY_USER
from gspo.common.streams.messages import word_of
from gspo.common.telemetry import metrics
from gspo.common.telemetry.bottleneck import STEPS_LOOKED_AT
from gspo.coordinator.ending import Ending
from gspo.coordinator.evaluation.scheduler import EvaluationScheduler
from gspo.coordinator.groups.slots import TRAINED, Slots
from gspo.coordinator.groups.spans import GroupTraces
from gspo.coordinator.groups.task_writer import TaskWriter
from gspo.coordinator.progress import ProgressSource
from gspo.coordinator.redis_state import gauges
from gspo.coordinator.redis_state.epoch import RedisEpoch
from gspo.coordinator.redis_state.listing import newest_entries, readable
from gspo_proto.learner_pb2 import ProgressReply
from gspo_proto.rollout_pb2 import (
    RUN_END_UNSPECIFIED,
    Event,
    PromptsExhausted,
    RunEnd,
    SettledGroup,
    Settlement,
    StepDone,
    StopRequested,
    TrainingDone,
)

_BLOCK_S = 0.25
_WATCH_S = 1.0
_RECONCILE_S = 10.0
# Events among which a starting coordinator finds the newest steps; a step has a handful.
_NUM_NEWEST_EVENTS = 200
# Events of the learner: those of an epoch below the newest come from one that has lost the run.
_FENCED = ("step_done", "groups_settled", "version_live", "checkpoint_done", "training_done")
log = structlog.get_logger()


class Coordinator:
    """One life of the coordinator in a run with a learner.

    Attributes:
        steps: Figures of the newest steps, oldest first: those that this life has heard of, and before them those
            that were still in the stream of events when it began.
    """

    def __init__(
        self,
        service: Service,
        *,
        slots: Slots,
        issuer: TaskWriter,
        scheduler: EvaluationScheduler,
        progress: ProgressSource,
        traces: GroupTraces,
    ) -> None:
        self._service, self._config, self._keys, self._redis = service, service.config, service.keys, service.redis
        self.slots, self.scheduler, self.ending = slots, scheduler, Ending(service.config.run)
        self._issuer, self._progress, self._redis_epoch = issuer, progress, RedisEpoch(service.redis, service.keys)
        self._traces = traces
        self._events = Events(service.redis, service.keys, service.options.name)
        self._position = FROM_START
        self.epoch = self._answered_epoch = 0
        self.paused, self.paused_because = False, ""
        self._requested_pause = ""
        self.steps: deque[dict[str, float]] = deque(maxlen=STEPS_LOOKED_AT)
        self._exhausted_sent = self._issues_on = False
        self._recorded_labels: frozenset[str] = frozenset()
        self._settled: list[int] = []
        self._sweep = False
        self._reconciling: asyncio.Task[ProgressReply | None] | None = None
        self._next_watch = self._next_reconcile = 0.0

    async def run(self) -> None:
        """Start from what is there, and go on until the run is finished or the process is asked to stop.

        Raises:
            TimeoutError: No learner told its progress within run.start_timeout_s, or no generator joined for
                an evaluation.
        """
        metrics.SLOTS.set(self.slots.num_slots)
        await self._start()
        while not self._ended:
            await self._tick()
        await self._remove_settled()
        await self.scheduler.cancel()
        if self._reconciling:
            self._reconciling.cancel()

    @property
    def _ended(self) -> bool:
        return self.ending.finished or self._service.stopping.is_set()

    async def _start(self) -> None:
        """Position of events first, then the learner's account, then the `open` hash: what overlaps counts once."""
        await self._read_newest_events()
        await self._redis_epoch.open()
        self._service.activity.set("waiting", "learner", "to say how far the run is")
        reply = await self._first_progress()
        if reply is None:
            return
        await self._issuer.read_open()
        self._apply_progress(reply)
        self._answered_epoch = reply.epoch
        self.scheduler.start(reply.version, reply.live_version, list(reply.evaluations))
        self._sweep = True
        self._service.problems.pop("starting", None)
        log.info("started", version=reply.version, open=len(self.slots.open), settled=len(self.slots.settled))

    async def _read_newest_events(self) -> None:
        """Begin behind the newest event; the newest steps before it are what to show until the next one ends."""
        entries = await newest_entries(self._redis, self._keys.events, _NUM_NEWEST_EVENTS)
        if entries:
            self._position = entries[0][0]
        events = [event for _, event in readable(Event, entries)]
        done = [event.step_done for event in events if event.WhichOneof("what") == "step_done"]
        self.steps.extend(dict(step.figures) for step in reversed(done[:STEPS_LOOKED_AT]))

    async def _first_progress(self) -> ProgressReply | None:
        """What the learner says; None where the run ends before it says anything."""
        limit_s = self._config.run.start_timeout_s
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            await self._read_events()
            if self._ended:
                return None
            # A learner that never comes is to be seen too.
            await gauges.show(self._redis, self._keys)
            if reply := await self._progress.ask():
                return reply
        raise TimeoutError(f"no learner told its progress within {limit_s:g} s (run.start_timeout_s)")

    async def _read_events(self) -> None:
        # While there is more to issue than one tick does, events are looked at in between, and not waited for.
        for entry, event in await self._events.read(self._position, 0.0 if self._issues_on else _BLOCK_S):
            self._position = entry
            self._apply(event)

    async def _tick(self) -> None:
        await self._read_events()
        await self._pause_if_asked()
        await self._remove_settled()
        await self._watch()
        await self._issue()
        await self._measure()
        await self._end()
        self._service.activity.set("waiting", *self.waits_for())

    def _apply(self, event: Event) -> None:
        kind = event.WhichOneof("what")
        if event.epoch < self.epoch and kind in _FENCED:
            log.warning("old_event", kind=kind, epoch=event.epoch, newest=self.epoch)
            return
        if event.epoch > self.epoch:
            self.epoch, self._next_reconcile = event.epoch, 0.0
        handlers: dict[str | None, Callable[[Event], None]] = {
            "step_done": lambda e: self._on_step(e.step_done),
            "groups_settled": lambda e: self._on_settled(e.groups_settled.groups),
            "version_live": lambda e: self._on_live(e.version_live.version),
            "training_done": lambda e: self._on_training_done(e.training_done),
            "stop_requested": lambda e: self.ending.on_stop(e.stop_requested.reason),
            "scoring_fails": lambda e: self._on_scoring_fails(e.scoring_fails.reason),
            "finished": lambda e: self.ending.on_finished(e.finished),
        }
        if kind in handlers:
            handlers[kind](event)

    def _on_training_done(self, done: TrainingDone) -> None:
        self.ending.on_training_done(done.version, done.end, done.reason)

    def _on_scoring_fails(self, reason: str) -> None:
        self._requested_pause = reason

    async def _pause_if_asked(self) -> None:
        if reason := self._requested_pause:
            self._requested_pause = ""
            self.paused, self.paused_because = True, reason
            await self._redis.set(self._keys.paused, reason)
            log.error("paused", reason=reason, detail="mend the function, then resume: POST /v1/resume")

    def _on_step(self, step: StepDone) -> None:
        self.steps.append(dict(step.figures))
        copied = any(entry.has_copies for group in step.groups if (entry := self.slots.open.get(group)))
        closed = self.slots.train(step.groups, step.version)
        self._traces.trained(closed, step.version)
        self._close(closed, TRAINED, sweep=copied)
        self.scheduler.on_step(step.step, step.version)

    def _on_live(self, version: int) -> None:
        self.slots.go_live(version)
        self._traces.live(version)

    def _on_settled(self, groups: Iterable[SettledGroup]) -> None:
        for settled in groups:
            name = Settlement.Name(settled.settlement).removeprefix("SETTLEMENT_").lower()
            closed = self.slots.settle([settled.group], name)
            self._traces.ended(closed, name)
            self._close(closed, name, sweep=True)

    def _close(self, groups: list[int], settlement: str, *, sweep: bool) -> None:
        metrics.GROUPS_SETTLED.labels(settlement).inc(len(groups))
        self._settled += groups
        self._sweep |= sweep and bool(groups)

    def _apply_progress(self, reply: ProgressReply) -> None:
        ranges = [(part.first, part.last) for part in reply.settled]
        closed = self.slots.reconcile(ranges, reply.version, reply.live_version, dict(reply.counts))
        self._traces.ended(closed, "unheard")
        self._settled += closed
        self._sweep |= bool(closed)
        self.epoch = max(self.epoch, reply.epoch)
        self._recorded_labels = frozenset(reply.evaluations)
        self.scheduler.catch_up(reply.version, reply.live_version, self._recorded_labels)
        if reply.end != RUN_END_UNSPECIFIED:
            self.ending.on_training_done(reply.version, reply.end, reply.end_reason)

    async def _remove_settled(self) -> None:
        groups, self._settled = self._settled, []
        # The tasks first: whoever holds one could save a rollout under a mark that is gone already.
        if self._sweep:
            self._sweep = False
            await self._issuer.remove_leftover_tasks()
        await self._issuer.remove_settled(groups)

    async def _watch(self) -> None:
        """Once a second: a wiped Redis, deadlines, the pause mark, stream lengths, the learner's account."""
        if time.monotonic() < self._next_watch:
            return
        self._next_watch = time.monotonic() + _WATCH_S
        if await self._redis_epoch.was_wiped():
            await self._recover_from_wipe()
        mark = await self._redis.get(self._keys.paused)
        self.paused = mark is not None
        metrics.PAUSED.set(self.paused)
        self.paused_because = mark.decode() if isinstance(mark, bytes) and mark != PAUSED_BY_USER else ""
        if not self.ending.over:
            await self._issuer.handle_expired()
        await gauges.show(self._redis, self._keys)
        await self._reconcile()

    async def _recover_from_wipe(self) -> None:
        log.warning("redis_wiped", open=len(self.slots.open), detail="open groups are issued again")
        self._position = FROM_START
        self._exhausted_sent, self._next_reconcile = False, 0.0
        if not self.ending.over:
            await self._issuer.reissue_open()
        await self.scheduler.resend_tasks()
        for event in self.scheduler.unrecorded(self._recorded_labels):
            await self._events.send(event)
        if self.paused:
            await self._redis.set(self._keys.paused, self.paused_because or PAUSED_BY_USER)
        if self.ending.stop_reason:
            await self._events.send(Event(stop_requested=StopRequested(reason=self.ending.stop_reason)))

    async def _reconcile(self) -> None:
        """Ask the learner now and then: an event may have been lost with Redis, or with a learner that died."""
        task = self._reconciling
        if task and task.done():
            self._reconciling = None
            if reply := task.result():
                self._apply_progress(reply)
                if reply.epoch > self._answered_epoch:
                    self._answered_epoch = reply.epoch
                    await self._resend_events()
        elif task is None and time.monotonic() >= self._next_reconcile:
            self._next_reconcile = time.monotonic() + _RECONCILE_S
            self._reconciling = asyncio.create_task(self._progress.ask(), name="reconcile")

    async def _resend_events(self) -> None:
        """A learner hears events from its start on: what was said while there was none is said to it again."""
        self._exhausted_sent = False
        for event in self.scheduler.unrecorded(self._recorded_labels):
            await self._events.send(event)
        if self.ending.stop_reason:
            await self._events.send(Event(stop_requested=StopRequested(reason=self.ending.stop_reason)))

    async def _issue(self) -> None:
        self._issues_on = False
        held_back = self.paused or self.scheduler.before_training or self.ending.over
        if not held_back and self.slots.num_free and not self.slots.exhausted:
            with self._service.activity.doing("issuing"):
                num = await self._issuer.issue_new(self.slots.num_free)
            self._issues_on = bool(num and self.slots.num_free)
            log.debug("issued", groups=num, taken=self.slots.num_taken)
        elif not self.ending.over:
            await self._issuer.prepare(self._config.algorithm.rollout_batch_size)
        if self.slots.exhausted and not self._exhausted_sent:
            self._exhausted_sent = True
            exhausted = PromptsExhausted(num_groups=self.slots.num_issued)
            await self._events.send(Event(epoch=self.epoch, prompts_exhausted=exhausted))
        metrics.GROUPS_OPEN.set(len(self.slots.open))

    async def _measure(self) -> None:
        if self.ending.stopped:
            await self.scheduler.cancel()
        if event := self.scheduler.tick(self.slots.live_version, over=self.ending.over):
            event.epoch = self.epoch
            await self._events.send(event)

    async def _end(self) -> None:
        if not self.ending.over or self.scheduler.busy:
            return
        if self.ending.ready_to_measure(self.slots.live_version) and self.scheduler.measure(self.ending.last_version):
            return
        if self.scheduler.unrecorded(self._recorded_labels) and self.ending.waits_for_records():
            # A learner that died has its successor write the last figures down: they are in the summary.
            self._next_reconcile = 0.0
            await self._reconcile()
            return
        if finished := self.ending.conclude(self.slots.live_version, len(self.slots.open)):
            await self._events.send(Event(epoch=self.epoch, finished=finished))
            self.ending.on_finished(finished)
            log.info("finished", reason=finished.reason, end=word_of(RunEnd, finished.end))

    def waits_for(self) -> tuple[str, str]:
        """What the loop waits for: a bounded name and its completion."""
        slots = self.slots
        if (progress := self.scheduler.describe()) and (self.scheduler.before_training or self.ending.over):
            return "evaluation", progress
        if self.ending.over:
            return self.ending.describe(slots.live_version, len(slots.open))
        if self.paused:
            because = f" ({self.paused_because})" if self.paused_because else ""
            return "resume", f"issue is paused{because}, {len(slots.open)} groups are open"
        if slots.exhausted:
            return "last groups", f"all {slots.num_issued} groups are issued, {len(slots.open)} are open"
        trained = f"{slots.num_trained} hold trained groups whose version no generator has yet"
        return "slots", f"to be free: of {slots.num_slots}, {len(slots.open)} hold open groups and {trained}"
