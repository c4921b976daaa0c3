"""A run that is one evaluation of the given model: no learner, no groups.

How it measures is evaluation.py's.
"""

from __future__ import annotations

from gspo.common.service.app import Service
from gspo.common.streams.events import Events
from gspo.common.streams.messages import body_of
from gspo.coordinator.evaluation.scheduler import EvaluationScheduler
from gspo.coordinator.redis_state.epoch import RedisEpoch
from gspo.coordinator.redis_state.listing import newest_position
from gspo_proto.rollout_pb2 import RUN_END_COMPLETED, RUN_END_STOPPED, Event, Finished, StopRequested

_BLOCK_S = 0.2


async def run_standalone_evaluation(service: Service, scheduler: EvaluationScheduler) -> None:
    """Measure version 0 on every file, announce the figures and the end; a stop or SIGTERM ends it early."""
    memory = RedisEpoch(service.redis, service.keys)
    events = Events(service.redis, service.keys, service.options.name)
    await memory.open()
    position = await newest_position(service.redis, service.keys.events)
    service.problems.pop("starting", None)
    scheduler.measure(0)
    done = False
    while not done and not service.stopping.is_set():
        for entry, event in await events.read(position, _BLOCK_S):
            position = entry
            match body_of(event):
                case StopRequested() | Finished():
                    service.stopping.set()
        if await memory.was_wiped():
            await scheduler.resend_tasks()
        if ended := scheduler.tick(0, over=False):
            await events.send(ended)
        done = not scheduler.busy
        service.activity.set("waiting", "evaluation", scheduler.describe())
    await scheduler.cancel()
    reason = "the evaluation is done" if done else "stopped before the evaluation was done"
    end = RUN_END_COMPLETED if done else RUN_END_STOPPED
    await events.send(Event(finished=Finished(reason=reason, end=end)))
