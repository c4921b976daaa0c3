"""The coordinator service: serves the run's HTTP API, reads the prompts, runs its loop or one evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog

from gspo.common.errors import InputError
from gspo.common.network.http_guard import ASGIApp, BoundedBodies
from gspo.common.service.app import App, Service, Work, run_app
from gspo.common.streams.events import Events
from gspo.coordinator.data.prompts import PromptSet, held_out_prompts, training_prompts
from gspo.coordinator.data.tokenizer import load_tokenizer
from gspo.coordinator.evaluation.evaluator import Evaluator
from gspo.coordinator.evaluation.scheduler import EvaluationScheduler, run_standalone_evaluation
from gspo.coordinator.groups.order import PromptOrder
from gspo.coordinator.groups.slots import Slots
from gspo.coordinator.groups.spans import GroupTraces
from gspo.coordinator.groups.task_writer import TaskWriter
from gspo.coordinator.http_api import make_http_api
from gspo.coordinator.loop import Coordinator
from gspo.coordinator.views import RecentRollouts, evaluation_state, run_state, run_status
from gspo_proto.rollout_pb2 import Event, StopRequested

# A stop with its reason is all that is sent here.
MAX_BODY_BYTES = 16 * 2**10
log = structlog.get_logger()


async def run_coordinator(service: Service) -> None:
    """Serve the run's HTTP API, and coordinate a run or one evaluation to its end."""
    await run_app(service, startup, http_port=service.config.services.coordinator_port)


@asynccontextmanager
async def startup(service: Service) -> AsyncIterator[App]:
    """Open the HTTP API, which shows the startup too, then read the prompts."""
    views = _RunViews(service)
    service.http_api = BoundedBodies(views.make_http_api(), MAX_BODY_BYTES)
    main = await (_evaluation(service, views) if service.options.evaluate else _training(service, views))
    yield App(main, background={"rollouts": views.rollouts.run}, sets_ready=True)


class _RunViews:
    """The state that the HTTP API shows: the startup at first, then the run or the evaluation.

    Attributes:
        state: The answer to /v1/state.
        steps: Figures of the newest steps.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.state: Callable[[], Awaitable[dict[str, Any]]] = self._starting
        self.steps: Callable[[], list[dict[str, float]]] = list
        self.rollouts = RecentRollouts(service.redis, service.keys)

    def make_http_api(self) -> ASGIApp:
        redis, keys, config = self._service.redis, self._service.keys, self._service.config
        return make_http_api(
            redis,
            keys,
            state=lambda: self.state(),
            status=lambda: run_status(redis, keys, config, self.steps()),
            stop=self._request_stop,
            rollouts=self.rollouts,
        )

    async def _starting(self) -> dict[str, Any]:
        return {"run": self._service.keys.run, "starting": self._service.activity.detail}

    async def _request_stop(self, reason: str) -> None:
        events = Events(self._service.redis, self._service.keys, self._service.options.name)
        await events.send(Event(stop_requested=StopRequested(reason=reason)))


async def _training(service: Service, views: _RunViews) -> Work:
    """The main loop of a run with a learner."""
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
        writer=TaskWriter(redis, keys, config, training, order, slots, traces),
        traces=traces,
        scheduler=_make_scheduler(service, held_out),
    )
    views.state = lambda: run_state(redis, keys, coordinator)
    views.steps = lambda: list(coordinator.steps)
    return coordinator.run


async def _evaluation(service: Service, views: _RunViews) -> Work:
    """The main loop of one evaluation of the given model: no learner, no groups.

    Raises:
        InputError: There are no held-out prompts.
    """
    if not service.config.evaluation.files:
        raise InputError("evaluation.prompts", "is not set, and it is what --evaluate measures on", "Set it")
    _, held_out = await asyncio.to_thread(_read_prompts, service)
    scheduler = _make_scheduler(service, held_out)
    views.state = lambda: evaluation_state(service.redis, service.keys, scheduler)
    return lambda: run_standalone_evaluation(service, scheduler)


def _make_scheduler(service: Service, held_out: dict[str, PromptSet]) -> EvaluationScheduler:
    redis, keys, config = service.redis, service.keys, service.config
    return EvaluationScheduler(redis, keys, config, Evaluator(redis, keys, config, held_out))


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
