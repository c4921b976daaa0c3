"""The coordinator process: reads its prompts, serves its door, runs its loop or one evaluation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from gspo.common.errors import InputError
from gspo.common.network.http_guard import BoundedBodies
from gspo.common.network.http_server import HttpServer
from gspo.common.service.app import Service
from gspo.common.service.health import HealthProbes
from gspo.common.streams.events import Events
from gspo.common.streams.instances import Instance, Registration
from gspo.common.streams.keys import COORDINATOR
from gspo.coordinator.data.prompts import PromptSet, held_out_prompts, training_prompts
from gspo.coordinator.data.tokenizer import load_tokenizer
from gspo.coordinator.evaluation.evaluator import Evaluator
from gspo.coordinator.evaluation.scheduler import EvaluationScheduler
from gspo.coordinator.evaluation.standalone import run_standalone_evaluation
from gspo.coordinator.groups.order import PromptOrder
from gspo.coordinator.groups.slots import Slots
from gspo.coordinator.groups.spans import GroupTraces
from gspo.coordinator.groups.task_writer import TaskWriter
from gspo.coordinator.http_api import make_http_api
from gspo.coordinator.loop import Coordinator
from gspo.coordinator.progress import ProgressSource
from gspo.coordinator.views import RecentRollouts, evaluation_state, run_state, run_status
from gspo_proto.rollout_pb2 import Event, StopRequested

# A stop with its reason is all that is sent here.
MAX_BODY_BYTES = 16 * 2**10
log = structlog.get_logger()


async def live(service: Service) -> None:
    """One life of the process, from its door to its end."""
    face = _HttpApi(service)
    await service.run(
        _evaluate(service, face) if service.options.evaluate else _coordinate(service, face), face.background()
    )


class _HttpApi:
    """Door and heartbeat; they are there before the prompts are read, which takes a while."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.state: Callable[[], Awaitable[dict[str, Any]]] = self._starting
        self.steps: Callable[[], list[dict[str, float]]] = list
        self._rollouts = RecentRollouts(service.redis, service.keys)
        app = make_http_api(
            service.redis,
            service.keys,
            state=lambda: self.state(),
            status=lambda: run_status(service.redis, service.keys, service.config, self.steps()),
            stop=self._request_stop,
            rollouts=self._rollouts,
        )
        port = service.options.http_port or service.config.services.coordinator_port
        face = HealthProbes(service, BoundedBodies(app, MAX_BODY_BYTES))
        self._http = HttpServer(face, service.options.host, port, service.config.services)

    def background(self) -> dict[str, Coroutine[Any, Any, Any]]:
        """What runs beside the main loop."""
        service = self._service
        instance = Instance(COORDINATOR, service.options.name, http=self._http.address, pid=os.getpid())
        registration = Registration(service.redis, service.keys, instance, service.activity, dict)
        return {"http": self._http.run(), "heartbeat": registration.run(), "rollouts": self._rollouts.run()}

    async def _starting(self) -> dict[str, Any]:
        return {"run": self._service.keys.run, "starting": self._service.activity.detail}

    async def _request_stop(self, reason: str) -> None:
        events = Events(self._service.redis, self._service.keys, self._service.options.name)
        await events.send(Event(stop_requested=StopRequested(reason=reason)))


async def _coordinate(service: Service, face: _HttpApi) -> None:
    """A run with a learner."""
    config, redis, keys = service.config, service.redis, service.keys
    training, held_out = await asyncio.to_thread(_read_prompts, service)
    assert training is not None  # noqa: S101 - only an evaluation goes without
    order = PromptOrder(
        len(training), seed=config.seed, shuffle=config.data.shuffle, total_epochs=config.run.total_epochs
    )
    slots = Slots(config.num_slots, config.algorithm.rollout_batch_size, order.num_groups)
    traces = GroupTraces(service.traces, config.algorithm.num_return_sequences_in_group)
    coordinator = Coordinator(
        service,
        slots=slots,
        issuer=TaskWriter(redis, keys, config, training, order, slots, traces),
        traces=traces,
        scheduler=_make_scheduler(service, held_out),
        progress=ProgressSource(service),
    )
    face.state = lambda: run_state(redis, keys, coordinator)
    face.steps = lambda: list(coordinator.steps)
    await coordinator.run()


async def _evaluate(service: Service, face: _HttpApi) -> None:
    """One evaluation of the given model: no learner, no groups.

    Raises:
        InputError: There are no held-out prompts.
    """
    if not service.config.evaluation.files:
        raise InputError("evaluation.prompts", "is not set, and it is what --evaluate measures on", "Set it")
    _, held_out = await asyncio.to_thread(_read_prompts, service)
    scheduler = _make_scheduler(service, held_out)
    face.state = lambda: evaluation_state(service.redis, service.keys, scheduler)
    await run_standalone_evaluation(service, scheduler)


def _make_scheduler(service: Service, held_out: dict[str, PromptSet]) -> EvaluationScheduler:
    redis, keys, config = service.redis, service.keys, service.config
    evaluator = Evaluator(redis, keys, config, held_out) if held_out else None
    return EvaluationScheduler(redis, keys, config, evaluator)


def _read_prompts(service: Service) -> tuple[PromptSet | None, dict[str, PromptSet]]:
    """Training prompts, unless this is only an evaluation, and held-out ones by file; runs in a thread."""

    def progress(done: int, total: int) -> None:
        service.activity.set("busy", "reading prompts", f"({done} of {total} checked)")

    service.activity.set("busy", "reading prompts", "(loading the tokenizer)")
    tokenizer = load_tokenizer(service.config.model)
    training = None if service.options.evaluate else training_prompts(service.config, tokenizer, progress)
    held_out = held_out_prompts(service.config, tokenizer, progress)
    if training is not None:
        log.info("prompts", usable=len(training), skipped=training.num_skipped)
    return training, held_out
