"""The other services as the coordinator sees them: a learner behind its real gRPC contract, a generator with a scorer.

They generate and train nothing: a test says what happened. Everything goes through the real streams and calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

import grpc
from redis.asyncio import Redis

from gspo.common.network.grpc_server import GrpcApi, GrpcServer
from gspo.common.streams.events import Events
from gspo.common.streams.inbox import EntryOutput, Inbox, new_consumer_name
from gspo.common.streams.instances import Instance, Registration
from gspo.common.streams.keys import Keys, rollout_key
from gspo.common.telemetry.activity import Activity
from gspo_proto.learner_pb2 import (
    REWARD_SPREAD_DIFFERENT,
    REWARD_SPREAD_EQUAL,
    GroupRange,
    ProgressReply,
    ProgressRequest,
    ResultsReply,
    ResultsRequest,
)
from gspo_proto.learner_pb2_grpc import LearnerServicer, add_LearnerServicer_to_server
from gspo_proto.rollout_pb2 import (
    OUTCOME_EOS,
    RUN_END_COMPLETED,
    RUN_END_STOPPED,
    SETTLEMENT_FILTERED,
    Event,
    GroupsSettled,
    GroupTask,
    Rollout,
    RunEnd,
    Score,
    Scored,
    ScoredRollout,
    SettledGroup,
    StepDone,
    TrainingDone,
    VersionLive,
)


class LearnerPeerServicer(LearnerServicer):
    def __init__(self, peer: LearnerPeer) -> None:
        self._peer = peer

    async def Progress(
        self, request: ProgressRequest, context: grpc.aio.ServicerContext[ProgressRequest, ProgressReply]
    ) -> ProgressReply:
        return self._peer.progress

    async def Results(
        self, request: ResultsRequest, context: grpc.aio.ServicerContext[ResultsRequest, ResultsReply]
    ) -> ResultsReply:
        if self._peer.results is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        spreads = (REWARD_SPREAD_EQUAL, REWARD_SPREAD_DIFFERENT)
        groups = self._peer.results[request.first :][:3]  # more than one page
        return ResultsReply(
            run=self._peer.keys.run,
            groups=[group for group, _ in groups],
            spreads=[spreads[differ] for _, differ in groups],
        )


class LearnerPeer:
    """Says what a learner says; `progress` is its own account.

    Attributes:
        down: While it is set, evaluations are not recorded: no learner hears the events.
        results: Those of the settled groups in order, each with whether its rewards differed; None: it does not answer.
        differs: Says it of a group.
        activity: What its heartbeat says.
        figures: Those of every step.
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis, self.keys, self.activity = redis, keys, Activity("learner")
        self.progress = ProgressReply(run=keys.run, epoch=1, version=0, live_version=0)
        self.events = Events(redis, keys, "learner-0")
        servicer = LearnerPeerServicer(self)  # type: ignore[abstract]  # nobody asks it for a checkpoint
        self._server = GrpcServer(
            GrpcApi("gspo.Learner", lambda server: add_LearnerServicer_to_server(servicer, server)),
            host="127.0.0.1",
            port=0,
            token="",
        )
        self.down, self.figures = False, dict[str, float]()
        self.results: list[tuple[int, bool]] | None = []
        self.differs: Callable[[int], bool] = lambda _: True
        self._beats: asyncio.Task[None] | None = None
        self._records: asyncio.Task[None] | None = None
        self._settles: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._server.start()
        instance = Instance("learner", "learner-0", grpc=self._server.address)
        registration = Registration(self.redis, self.keys, instance, self.activity, dict)
        self._beats = asyncio.create_task(registration.run())
        self._records = asyncio.create_task(self._record())

    async def stop(self) -> None:
        assert self._beats is not None and self._records is not None
        await _cancel(self._beats)
        await _cancel(self._records)
        if self._settles:
            await _cancel(self._settles)
        await self._server.stop(0)

    async def _record(self) -> None:
        async for event in self.events.follow():
            label = event.evaluation_done.evaluation
            if label and not self.down and label not in self.progress.evaluations:
                self.progress.evaluations.append(label)

    async def trained(self, groups: Iterable[int], *, silent: bool = False) -> int:
        """A step: its groups are settled, then StepDone, unless it dies in between."""
        groups = list(groups)
        self._settle(groups, "trained")
        self.progress.step = self.progress.version = self.progress.version + 1
        if not silent:
            figures = {"train_s": float(self.progress.step), **self.figures}
            done = StepDone(step=self.progress.step, version=self.progress.version, groups=groups, figures=figures)
            await self.send(Event(step_done=done))
        return int(self.progress.version)

    async def filtered(self, *groups: int) -> None:
        """Groups ended without being trained."""
        self._settle(groups, "filtered")
        settled = [SettledGroup(group=group, settlement=SETTLEMENT_FILTERED, reason="test") for group in groups]
        await self.send(Event(groups_settled=GroupsSettled(groups=settled)))

    async def live(self, version: int) -> None:
        """A generator has the version."""
        self.progress.live_version = version
        await self.send(Event(version_live=VersionLive(version=version)))

    async def training_done(self, reason: str, end: RunEnd.ValueType = RUN_END_COMPLETED) -> None:
        """The last step is trained; from now on open groups are settled, unless the run was stopped."""
        self.progress.end, self.progress.end_reason = end, reason
        await self.send(Event(training_done=TrainingDone(version=self.progress.version, reason=reason, end=end)))
        if end != RUN_END_STOPPED and not self.down:
            self._settles = asyncio.create_task(self._settle_open())

    async def _settle_open(self) -> None:
        """The coordinator may issue more groups before TrainingDone reaches it."""
        while True:
            settled = {group for part in self.progress.settled for group in range(part.first, part.last + 1)}
            if unsettled := {int(group) for group in await self.redis.hkeys(self.keys.open)} - settled:
                await self.filtered(*unsettled)
            await asyncio.sleep(0.1)

    async def send(self, event: Event) -> None:
        event.epoch = self.progress.epoch
        await self.events.send(event)

    def _settle(self, groups: Iterable[int], name: str) -> None:
        for group in groups:
            self.progress.settled.append(GroupRange(first=group, last=group))
            self.progress.counts[name] += 1
            if self.results is not None:
                self.results.append((group, self.differs(group)))


class GeneratorPeer:
    """Registers as a generator, takes tasks, and answers evaluation tasks with the rewards of the test."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis, self.keys, self.activity = redis, keys, Activity("generation")
        self._tasks = Inbox(redis, keys, keys.prompts, consumer=new_consumer_name("generation"), lease_s=30.0)
        self._eval_tasks = Inbox(redis, keys, keys.eval_prompts, consumer=new_consumer_name("generation"), lease_s=30.0)

        self._beats: asyncio.Task[None] | None = None

    async def start(self) -> None:
        instance = Instance("generation", "generation-0", grpc="nowhere:1")
        registration = Registration(self.redis, self.keys, instance, self.activity, dict)
        self._beats = asyncio.create_task(registration.run())

    async def stop(self) -> None:
        assert self._beats is not None
        await _cancel(self._beats)

    async def take(self, count: int = 64, block_s: float = 0.05) -> list[GroupTask]:
        """Tasks taken and finished at once: their rollouts are of no interest."""
        tasks = []
        for delivery in await self._tasks.take(count, block_s):
            tasks.append(GroupTask.FromString(delivery.payload))
            await self._tasks.finish(delivery)
        return tasks

    async def answer(self, rewards: dict[int, list[float]], count: int = 64) -> list[GroupTask]:
        """Take evaluation tasks and write scored answers; `rewards` by kind: sampled (0), greedy (1)."""
        tasks = []
        for delivery in await self._eval_tasks.take(count, 0.05):
            task = GroupTask.FromString(delivery.payload)
            tasks.append(task)
            for number in range(task.num_rollouts):
                scored = _scored(task, number, rewards[task.group % 2][number])
                key = rollout_key(task.group, number, task.evaluation)
                await self._eval_tasks.put([EntryOutput(delivery, self.keys.eval_scored, scored, key)])
            await self._eval_tasks.finish(delivery)
        return tasks


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _scored(task: GroupTask, number: int, reward: float) -> bytes:
    rollout = Rollout(
        group=task.group,
        number=number,
        num_rollouts=task.num_rollouts,
        token_ids=[5, 6],
        logp=[-0.5, -0.25],
        version=[task.min_version, task.min_version],
        mask=b"\x01\x01",
        outcome=OUTCOME_EOS,
        evaluation=task.evaluation,
        finished_unix_s=time.time(),
    )
    scored = ScoredRollout(rollout=rollout, score=Score(reward=reward))
    return Scored(schema=1, rollout=scored).SerializeToString()
