"""The reward service: `python -m services.reward`.

What it does is in worker.py and scorer.py, its faces are in door.py.
"""

from __future__ import annotations

import os

import structlog

from gspo_proto.reward_pb2_grpc import add_RewardServicer_to_server
from services.common.events import Events
from services.common.members import Member, Registration
from services.common.probes import HttpServer, Probes
from services.common.rpc import GrpcServer
from services.common.runtime import Service, parse_options, run_service
from services.reward.check import check
from services.reward.door import GRPC_SERVICE, RewardServicer, rest_app
from services.reward.scorer import Scorer, open_scorer
from services.reward.worker import Worker

GRPC_GRACE_S = 5.0
log = structlog.get_logger()


async def live(service: Service) -> None:
    """Load the functions, open both doors, score until the run ends or a signal comes."""
    events = Events(service.redis, service.keys, service.options.name)
    position = await events.newest()
    run = service.config.name
    async with open_scorer(service.config.reward, name=service.options.name, session=run) as scorer:
        if found := scorer.containment:
            service.facts["sandbox"] = str(found)
            log.info("sandbox", level=found.level.name, parts=found.parts, lacks=found.level.lacks)
        await _serve(service, scorer, events, position)


async def _serve(service: Service, scorer: Scorer, events: Events, position: bytes) -> None:
    options = service.options
    http = HttpServer(Probes(service, rest_app(scorer)), options.host, options.http_port)
    grpc = GrpcServer(
        lambda server: add_RewardServicer_to_server(RewardServicer(scorer), server),
        (GRPC_SERVICE,),
        host=options.host,
        port=options.grpc_port,
        token=options.token,
    )
    await grpc.start()
    member = Member("reward", options.name, http=http.address, grpc=grpc.address, pid=os.getpid())
    facts = {name: function.source.version for name, function in scorer.functions.items()}
    registration = Registration(service.redis, service.keys, member, service.activity, lambda: {"functions": facts})

    async def end_with_the_run() -> None:
        await events.until_finished(position)
        service.stopping.set()

    service.problems.clear()
    background = {"http": http.run(), "heartbeat": registration.run(), "finished": end_with_the_run()}
    try:
        await service.run(Worker(service, scorer).run(), background)
    finally:
        await grpc.stop(GRPC_GRACE_S)


if __name__ == "__main__":
    run_service(parse_options("reward", check, meaning="Scores rollouts with the run's reward functions."), live)
