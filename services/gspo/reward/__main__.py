"""The reward service: `python -m gspo.reward`.

What it does is in worker.py and scorer.py, its faces are in door/.
"""

from __future__ import annotations

import os

import structlog

from gspo.common.network.grpc_server import GrpcServer
from gspo.common.network.http_server import HttpServer
from gspo.common.service.app import Service, run_service
from gspo.common.service.health import HealthProbes
from gspo.common.service.options import await_start, parse_options
from gspo.common.streams.events import Events
from gspo.common.streams.instances import Instance, Registration
from gspo.common.telemetry import metrics
from gspo.reward.check import check
from gspo.reward.http_api.access import AccessControl
from gspo.reward.http_api.application import rest_app
from gspo.reward.http_api.routes import ApiDependencies
from gspo.reward.registry.store import Registry
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.launch import LEVEL_NAMES
from gspo.reward.scoring.consumer import ScoringConsumer
from gspo.reward.scoring.scorer import Scorer, open_scorer
from gspo.reward.servicer import GRPC_SERVICE, RewardServicer
from gspo.reward.submissions.admission import Admission
from gspo.reward.submissions.callers import Callers, RateLimit
from gspo_proto.reward_pb2_grpc import add_RewardServicer_to_server

GRPC_GRACE_S = 5.0
log = structlog.get_logger()


async def live(service: Service) -> None:
    """Load the functions, open both doors, score until the run ends or a signal comes."""
    config, name = service.config, service.options.name
    events = Events(service.redis, service.keys, name)
    position = await events.newest()
    registry = Registry(service.redis, config.registry_dir, replica=name, quotas=config.reward.quotas)
    usage = UsageCounter(service.redis)
    opened = open_scorer(
        config.reward,
        name=name,
        environment=config.environment,
        session=config.name,
        registry=registry,
        usage=usage,
    )
    async with opened as scorer:
        found = scorer.library.confinement
        service.facts["sandbox"] = str(found)
        metrics.SANDBOX_LEVEL.set(LEVEL_NAMES.index(found.level.name))
        log.info("sandbox", level=found.level.name, parts=found.parts, lacks=found.level.lacks)
        guard = AccessControl(
            Callers(service.options.token, config.reward.tokens), RateLimit(config.reward.calls_per_minute)
        )
        admission = Admission(scorer.library, config.reward.allowed_packages)
        desk = ApiDependencies(scorer.library, registry, admission, usage, guard)
        await _serve(service, scorer, desk, events, position)


async def _serve(service: Service, scorer: Scorer, desk: ApiDependencies, events: Events, position: bytes) -> None:
    options = service.options
    services, face = service.config.services, HealthProbes(service, rest_app(desk), guards_itself=True)
    http = HttpServer(face, options.host, options.http_port, services, takes_forms=True)
    grpc = GrpcServer(
        lambda server: add_RewardServicer_to_server(RewardServicer(scorer, session=service.config.name), server),
        (GRPC_SERVICE,),
        host=options.host,
        port=options.grpc_port,
        token=options.token,
        may_call=lambda token: desk.guard.callers.find(token) is not None,
        tls=services.tls,
    )
    await grpc.start()
    instance = Instance("reward", options.name, http=http.address, grpc=grpc.address, pid=os.getpid())
    facts = {name: function.source.version for name, function in scorer.functions.items()}
    registration = Registration(service.redis, service.keys, instance, service.activity, lambda: {"functions": facts})

    async def end_with_the_run() -> None:
        await events.wait_for_finished(position)
        service.stopping.set()

    service.problems.clear()
    background = {
        "http": http.run(),
        "heartbeat": registration.run(),
        "finished": end_with_the_run(),
        "registry": desk.registry.run(),
        "usage": desk.usage.run(),
    }
    try:
        await service.run(ScoringConsumer(service, scorer).run(), background)
    finally:
        await grpc.stop(GRPC_GRACE_S)


if __name__ == "__main__":
    options = parse_options("reward", check, meaning="Scores rollouts with the run's reward functions.")
    run_service(await_start(options), live)
