"""The life of a generation process: start the engine, serve, end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import structlog
from transformers import AutoTokenizer

from gspo.common.config.schema import Config
from gspo.common.model.folder import model_folder
from gspo.common.network.grpc_server import GrpcServer
from gspo.common.network.http_server import HttpServer
from gspo.common.service.app import Service
from gspo.common.service.health import HealthProbes
from gspo.common.service.tasks import end_tasks
from gspo.common.streams.events import Events
from gspo.common.streams.instances import Instance, Registration
from gspo.generation.check import check
from gspo.generation.engine.api import EngineLike
from gspo.generation.engine.staging import StagedWeights
from gspo.generation.rollout.driver import RolloutDriver
from gspo.generation.rollout.environment_client import EnvironmentClient
from gspo.generation.rollout.episodes import Episodes
from gspo.generation.servicer import SERVICE_NAME, GenerationGrpcServicer
from gspo.generation.worker import Worker
from gspo_proto import generation_pb2_grpc

log = structlog.get_logger()
StartEngine: TypeAlias = Callable[[Config, Path], Awaitable[EngineLike]]


async def live(service: Service, start_engine: StartEngine) -> None:
    """Start, serve until the run is finished or the service is stopped, end the engine.

    Args:
        start_engine: From the configuration and the model's folder; start.py's, or one that simulates.
    """
    options, config = service.options, service.config
    events = Events(service.redis, service.keys, options.service)
    position = await events.newest()
    http = HttpServer(HealthProbes(service), options.host, options.http_port, config.services)
    serving = asyncio.create_task(http.run())
    # Before the engine, which takes a while: whoever looks sees what this process is doing.
    instance = Instance("generation", options.name, http=http.address, pid=os.getpid())
    registration = Registration(service.redis, service.keys, instance, service.activity, dict)
    beating = asyncio.create_task(registration.run())
    try:
        if options.stay:  # nobody has checked before
            await asyncio.to_thread(check, config)
        folder = model_folder(config.model)
        service.activity.set("busy", "reading the weights")
        staged = await asyncio.to_thread(StagedWeights.from_folder, folder, config.generation.dtype)
        # Its own processes import, load the model and answer a first request before it returns.
        service.activity.set("busy", "starting vLLM", "and loading the model into it")
        await registration.beat()
        engine = await start_engine(config, folder)
        try:
            background = {"heartbeat": _outcome(beating), "end": _until_end(service, events, position)}
            await _serve(service, engine, staged, registration, background)
        finally:
            await engine.stop()
            staged.close()
    finally:
        await end_tasks({serving, beating})


async def _outcome(task: asyncio.Task[None]) -> None:
    await task


async def _until_end(service: Service, events: Events, position: bytes) -> None:
    finished = await events.wait_for_finished(position)
    log.info("run_finished", reason=finished.reason)
    service.stopping.set()


async def _serve(
    service: Service,
    engine: EngineLike,
    staged: StagedWeights,
    registration: Registration,
    background: dict[str, Coroutine[Any, Any, None]],
) -> None:
    options = service.options
    folder = model_folder(service.config.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=service.config.model.trust_remote_code)
    tls = service.config.services.tls
    environments = EnvironmentClient(service.redis, service.keys, options.token, service.activity, tls=tls)
    episodes = Episodes(environments, tokenizer)
    rollouts = RolloutDriver(engine, tokenizer, service.config.generation, options.name, episodes)
    worker = Worker(service, engine, rollouts)
    door = GenerationGrpcServicer(service, engine, staged, rollouts, worker)
    grpc_server = GrpcServer(
        lambda server: generation_pb2_grpc.add_GenerationServicer_to_server(door, server),
        (SERVICE_NAME,),
        host=options.host,
        port=options.grpc_port,
        token=options.token,
        tls=service.config.services.tls,
    )
    await grpc_server.start()
    await registration.open(grpc_server.address, door.facts)
    service.problems.clear()
    try:
        watched = {**background, "engine": door.wait_until_broken(), "environments": environments.run()}
        await service.run(worker.run(), watched)
    finally:
        await grpc_server.stop(grace_s=1.0)
