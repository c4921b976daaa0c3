"""The coordinator's loop: keeps the slots full, evaluates the policy in between, and ends the run.

consumes: events, the learner's progress.
produces: tasks, evaluations, EvaluationDone, PromptsExhausted, Finished; StopRequested again for a new learner.
waits for: slots, unblocked by VersionLive and GroupsSettled, and answers, unblocked by generation and reward. At the
end it waits for the last version, unblocked by VersionLive.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

import structlog
from google.protobuf.message import Message

from gspo.common.service.app import Service
from gspo.common.streams.entries import word_of
from gspo.common.telemetry import metrics
from gspo.common.telemetry.advice import findings, rules_of
from gspo.common.telemetry.findings import Finding, RecentSteps
from gspo.common.telemetry.first_answers import FIRST_ANSWERS, first_answers, scores_finding
from gspo.coordinator.data.prompt_checks import FAULTS
from gspo.coordinator.ending import Ending
from gspo.coordinator.evaluation.scheduler import EvaluationScheduler
from gspo.coordinator.feed import EventFeed, LearnerProgress
from gspo.coordinator.groups.ledger import GroupLedger
from gspo.coordinator.redis_state import IssuePause, RedisEpoch, update_gauges
from gspo.coordinator.stall_watch import Remedy, StallWatch
from gspo.runlog.checks import write_checks
from gspo.runlog.run_log import RunLog
from gspo_proto.learner_pb2 import ProgressReply
from gspo_proto.rollout_pb2 import (
    RUN_END_FAILED,
    RUN_END_UNSPECIFIED,
    EvaluationDone,
    Event,
    Finished,
    FirstAnswers,
    GroupsSettled,
    PromptsExhausted,
    RunEnd,
    ScoresDiffer,
    ScoringFails,
    Stalled,
    StepDone,
    StopRequested,
    TrainingDone,
    VersionLive,
)

_BLOCK_S = 0.25
_WATCH_S = 1.0
log = structlog.get_logger()


class Coordinator:
    """The coordinator of a run with a learner.

    Attributes:
        recent: The newest steps and evaluations. At the start they come from the stream of events.

    Args:
        checks: The findings of the start, to which those of the first answers are added.
    """

    def __init__(
        self,
        service: Service,
        ledger: GroupLedger,
        scheduler: EvaluationScheduler,
        checks: list[Finding] | None = None,
    ) -> None:
        self._service, self._ledger, self.slots = service, ledger, ledger.slots
        self.scheduler, self.ending = scheduler, Ending(service.config.run)
        self.feed, self.pause = EventFeed(service), IssuePause(service.redis, service.keys)
        self._learner, self._redis_epoch = LearnerProgress(service), RedisEpoch(service.redis, service.keys)
        self._stalls = StallWatch(service.redis, service.keys, service.config)
        self._checks = [] if checks is None else checks
        self.recent, self._warned = RecentSteps(service.config.evaluation.headline), set[str]()
        self._next_watch_s = 0.0
        # Whether the last tick left slots free that the next one can fill.
        self._can_issue_more = False
        # Whether the end of the prompts is announced.
        self._announced = False

    async def run(self) -> None:
        """Start from the run's recorded state, and coordinate it until it is finished or the process must stop.

        Raises:
            TimeoutError: No learner reported its progress within run.start_timeout_s, or no generator joined for
                an evaluation.
        """
        await self._start()
        while not self._is_over:
            await self._tick()
        await self._ledger.remove_settled()
        await self.scheduler.cancel()
        self._learner.cancel()
        self._ledger.close()

    @property
    def _is_over(self) -> bool:
        return self.ending.finished or self._service.stopping.is_set()

    async def _start(self) -> None:
        """Position of events first, then the learner's progress, then the `open` hash: overlaps count once."""
        for body in reversed(await self.feed.start()):
            self._note(body)
            if isinstance(body, ScoresDiffer):
                self._add_checks([scores_finding(body)])
            if isinstance(body, FirstAnswers):
                self._add_first_answers(body.figures)
        await self._redis_epoch.open()
        self._service.activity.set("waiting", "learner", "to report its progress")
        reply = await self._first_progress()
        if reply is None:
            return
        await self._ledger.read_open()
        self._apply_progress(reply)
        self.scheduler.start(reply.version, reply.evaluations)
        self._service.problems.pop("starting", None)
        log.info("started", version=reply.version, open=len(self.slots.open), settled=len(self.slots.settled))

    async def _first_progress(self) -> ProgressReply | None:
        """The learner's progress; None where the run ends before the learner answers."""
        limit_s = self._service.config.run.start_timeout_s
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            await self._read_events()
            if self._is_over:
                return None
            # The gauges also show a learner that never registers.
            await update_gauges(self._service.redis, self._service.keys)
            if reply := await self._learner.ask():
                return reply
        raise TimeoutError(f"no learner reported its progress within {limit_s:g} s (run.start_timeout_s)")

    async def _tick(self) -> None:
        await self._read_events()
        await self._ledger.remove_settled()
        await self._watch()
        await self._issue()
        if self.ending.stopped:
            await self.scheduler.cancel()
        if event := self.scheduler.tick(self.slots.live_version, over=self.ending.over):
            await self.feed.send(event)
        await self._conclude()
        self._service.activity.set("waiting", *self.waits_for())

    async def _read_events(self) -> None:
        epoch = self.feed.epoch
        # While one tick cannot issue every free group, events are read in between without a wait.
        for body in await self.feed.read(0.0 if self._can_issue_more else _BLOCK_S):
            await self._apply(body)
        if self.feed.epoch > epoch:
            self._learner.ask_now()

    async def _issue(self) -> None:
        """Issue groups for the free slots, or read the next batch's prompts; announce the end of the prompts once."""
        may_issue = not (self.pause.active or self.scheduler.before_training or self.ending.over)
        self._can_issue_more = False
        if may_issue and self.slots.num_free and not self.slots.exhausted:
            with self._service.activity.doing("issuing"):
                num_issued = await self._ledger.issue(self.slots.num_free)
            self._can_issue_more = bool(num_issued and self.slots.num_free)
            log.debug("issued", groups=num_issued, taken=self.slots.num_taken)
        elif not self.ending.over:
            await self._ledger.prepare(self._service.config.algorithm.rollout_batch_size)
        if self.slots.exhausted and not self._announced:
            self._announced = True
            await self.feed.send(Event(prompts_exhausted=PromptsExhausted(num_groups=self.slots.num_issued)))
        metrics.GROUPS_OPEN.set(len(self.slots.open))

    def _note(self, body: Message) -> None:
        """Keep the figures of a step or an evaluation."""
        match body:
            case StepDone() as step:
                self.recent.add(step.step, step.figures)
            case EvaluationDone() as done:
                self.recent.add_evaluation(done.file, done.version, done.figures)

    def _judge(self) -> None:
        """Show the findings on learning at the newest step: a warning for each new one, and a gauge."""
        seen = findings(self.recent.judged(), self._service.config)
        for name in seen.keys() - self._warned:
            log.warning("finding", rule=name, text=seen[name].text)
        self._warned = set(seen)
        for rule in rules_of(self._service.config):
            metrics.FINDING.labels(rule.name).set(rule.name in seen)

    def _add_checks(self, seen: Sequence[Finding]) -> None:
        """Keep findings with those of the start, unless they are there."""
        new = [check for check in seen if check not in self._checks]
        self._checks += new
        write_checks(RunLog(self._service.options.run_dir).folder, self._checks)
        for check in new:
            metrics.FINDING.labels(check.rule).set(check.rule in FAULTS)
            log.warning("finding", rule=check.rule, text=check.text)

    def _add_first_answers(self, figures: Mapping[str, float]) -> None:
        """Judge the first answers, unless an earlier process of this service or of the learner did."""
        if all(check.rule != FIRST_ANSWERS for check in self._checks):
            self._add_checks(first_answers(figures, self._service.config))

    async def _apply(self, body: Message) -> None:
        self._note(body)
        match body:
            case StepDone() as step:
                self._judge()
                self._ledger.on_step(step)
                self.scheduler.on_step(step.step, step.version)
            case GroupsSettled(groups=groups):
                self._ledger.on_settled(groups)
            case VersionLive(version=version):
                self._ledger.on_live(version)
            case TrainingDone() as done:
                self.ending.on_training_done(done.version, done.end, done.reason)
            case StopRequested(reason=reason):
                self.ending.on_stop(reason)
            case ScoringFails(reason=reason):
                await self.pause.begin(reason)
            case FirstAnswers(figures=figures):
                await asyncio.to_thread(self._add_first_answers, figures)
            case ScoresDiffer() as differ:
                await asyncio.to_thread(self._add_checks, [scores_finding(differ)])
            case Finished() as finished:
                self.ending.on_finished(finished)

    def _apply_progress(self, reply: ProgressReply) -> bool:
        """Take over the learner's own account. Returns whether it comes from a new learner."""
        self.feed.epoch = max(self.feed.epoch, reply.epoch)
        self._ledger.on_progress(reply)
        self.scheduler.catch_up(reply.version, reply.live_version, reply.evaluations)
        if reply.end != RUN_END_UNSPECIFIED:
            self.ending.on_training_done(reply.version, reply.end, reply.end_reason)
        return self._learner.note(reply)

    async def _watch(self) -> None:
        """Once a second: a wiped Redis, the pause, deadlines, gauges, the learner's progress, a stall."""
        if time.monotonic() < self._next_watch_s:
            return
        self._next_watch_s = time.monotonic() + _WATCH_S
        if await self._redis_epoch.was_wiped():
            await self._recover_from_wipe()
        await self.pause.refresh()
        if not self.ending.over:
            await self._ledger.handle_expired()
        await update_gauges(self._service.redis, self._service.keys)
        for row in self.curriculum():
            metrics.PROMPTS_EQUAL.labels(row["source"]).set(int(row["equal"]))
        await self._reconcile()
        if not (self.ending.over or self.scheduler.busy):
            await self._end_stall(await self._stalls.look(time.monotonic(), self.waits_for(), self.slots))

    async def _end_stall(self, remedy: Remedy | None) -> None:
        """Issue the open groups again where nothing moves; end the run where that has not helped."""
        still_s, chain = self._stalls.clock.limit_s, self._stalls.chain
        if remedy == "issue again":
            log.error("stalled", seconds=still_s, chain=chain, detail="open groups are issued again")
            await self.feed.send(Event(stalled=Stalled(reason=f"nothing has moved for {still_s:g} s: {chain}")))
            self._learner.ask_now()
            await self._ledger.reissue_open("stalled")
        elif remedy == "end":
            reason = f"nothing moved, also after the open groups were issued again: {chain}; a resume continues"
            finished = Finished(reason=reason, end=RUN_END_FAILED)
            await self.feed.send(Event(finished=finished))
            self.ending.on_finished(finished)
            log.error("finished", reason=reason)

    async def _recover_from_wipe(self) -> None:
        log.warning("redis_wiped", open=len(self.slots.open), detail="open groups are issued again")
        self.feed.rewind()
        self._learner.ask_now()
        if not self.ending.over:
            await self._ledger.reissue_open("redis_wiped")
        await self.scheduler.resend_tasks()
        await self.pause.restore()
        await self._resend()

    async def _reconcile(self) -> None:
        """Ask the learner now and then: an event may have been lost with Redis, or with a learner that died."""
        reply = self._learner.poll()
        if reply is not None and self._apply_progress(reply):
            await self._resend()

    async def _resend(self) -> None:
        """Send again what a new learner, or a wiped Redis, has missed: a learner reads events from its start on."""
        self._announced = False
        for event in self.scheduler.unrecorded(self._learner.recorded):
            await self.feed.send(event)
        if self.ending.stop_reason:
            await self.feed.send(Event(stop_requested=StopRequested(reason=self.ending.stop_reason)))

    async def _conclude(self) -> None:
        if not self.ending.over or self.scheduler.busy:
            return
        if self.ending.ready_to_measure(self.slots.live_version) and self.scheduler.request(self.ending.last_version):
            return
        if self.scheduler.unrecorded(self._learner.recorded) and self.ending.waits_for_records():
            # The successor of a learner that died records the last figures, which the summary shows.
            self._learner.ask_now()
            await self._reconcile()
            return
        if finished := self.ending.conclude(self.slots.live_version, len(self.slots.open)):
            # Groups may have been settled in this tick, and on Finished the learner closes the token ledger.
            await self._ledger.remove_settled()
            await self.feed.send(Event(finished=finished))
            self.ending.on_finished(finished)
            log.info("finished", reason=finished.reason, end=word_of(RunEnd, finished.end))

    def curriculum(self) -> list[dict[str, str | int]]:
        """Figures of each source under data.curriculum: its prompts, those with equal rewards, its passes."""
        return self._ledger.order.describe()

    def waits_for(self) -> tuple[str, str]:
        """The awaited event: a bounded name and its completion."""
        slots, num_open = self.slots, len(self.slots.open)
        if (progress := self.scheduler.describe()) and (self.scheduler.before_training or self.ending.over):
            return "evaluation", progress
        if self.ending.over:
            return self.ending.describe(slots.live_version, num_open)
        if self.pause.active:
            because = f" ({self.pause.reason})" if self.pause.reason else ""
            return "resume", f"issue is paused{because}, {num_open} groups are open"
        if self._ledger.lacks_results:
            return "learner", "to send the results of settled groups, which the curriculum follows"
        if slots.exhausted:
            return "last groups", f"all {slots.num_issued} groups are issued, {num_open} are open"
        trained = f"{slots.num_trained} hold trained groups whose version no generator has yet"
        return "slots", f"to be free: of {slots.num_slots}, {num_open} hold open groups and {trained}"
