"""The reward service: loads the reward functions, serves both APIs, scores until the run ends."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from gspo.common.network.grpc_server import GrpcApi
from gspo.common.service.app import App, Service, run_app
from gspo.common.telemetry import metrics
from gspo.reward.functions.run_record import RunRecord
from gspo.reward.http_api.routes import RewardApi, rest_app
from gspo.reward.registry.store import Registry
from gspo.reward.registry.usage import UsageCounter
from gspo.reward.sandbox.launch import LEVEL_NAMES
from gspo.reward.scoring.consumer import ScoringConsumer
from gspo.reward.scoring.scorer import open_scorer
from gspo.reward.servicer import GRPC_SERVICE, RewardServicer
from gspo.reward.submissions.admission import Admission
from gspo.reward.submissions.callers import Callers
from gspo_proto.reward_pb2_grpc import add_RewardServicer_to_server

GRPC_GRACE_S = 5.0
log = structlog.get_logger()


async def run_reward(service: Service) -> None:
    """Score until the run ends or a signal comes."""
    await run_app(service, startup, authorizes_itself=True, takes_forms=True, ends_with_run=True)


@asynccontextmanager
async def startup(service: Service) -> AsyncIterator[App]:
    """Load the functions into their sandboxes, and open the HTTP API."""
    config, name = service.config, service.options.name
    registry = Registry(service.redis, config.registry_dir, replica=name, quotas=config.reward.quotas)
    usage = UsageCounter(service.redis)
    record = RunRecord(service.options.run_dir / "log", usage, service.uid)
    opened = open_scorer(
        config.reward,
        name=name,
        sources=config.sources,
        session=config.name,
        registry=registry,
        usage=usage,
        on_use=record.keep,
        model=config.model,
    )
    async with opened as scorer, Admission(scorer.library, config.reward.allowed_packages) as admission:
        level = scorer.library.confinement
        service.facts["sandbox"] = str(level)
        metrics.SANDBOX_LEVEL.set(LEVEL_NAMES.index(level.name))
        log.info("sandbox", level=level.name, parts=level.parts, lacks=level.lacks)
        callers = Callers(service.options.token, config.reward.tokens)
        api = RewardApi(scorer.library, registry, admission, usage)
        service.http_api = rest_app(api, callers, config.reward.calls_per_minute)
        servicer = RewardServicer(scorer, session=config.name)
        versions = {name: function.code.version for name, function in scorer.library.configured.items()}
        yield App(
            ScoringConsumer(service, scorer).run,
            background={"registry": registry.run, "usage": usage.run, "record": record.run},
            grpc=GrpcApi(
                GRPC_SERVICE,
                lambda server: add_RewardServicer_to_server(servicer, server),
                may_call=lambda token: callers.find(token) is not None,
                grace_s=GRPC_GRACE_S,
            ),
            facts=lambda: {"functions": versions},
        )
