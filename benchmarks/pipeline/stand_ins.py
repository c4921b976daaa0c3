"""Generators without engines in one process: each has a gRPC server and a heartbeat, and takes every push.

`python -m benchmarks.pipeline.stand_ins RUN_DIR REDIS_URL NUMBER`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from gspo.common.config.loading import CONFIG_NAME, read_config
from gspo.common.network.grpc_server import ADMITTED, GrpcApi, GrpcServer
from gspo.common.service.app import Service
from gspo.common.service.options import Options
from gspo.common.streams.instances import Instance, Registration
from gspo.common.streams.keys import GENERATION
from gspo.common.telemetry.activity import Activity
from gspo.generation.servicer import SERVICE_NAME, Context, GenerationGrpcServicer
from gspo_proto.generation_pb2 import DescribeRequest, GeneratorDescription, PushHeader, PushResult, WeightFrame
from gspo_proto.generation_pb2_grpc import add_GenerationServicer_to_server


class StandIn(GenerationGrpcServicer):
    """Serves the version that it was sent last, and keeps no weights."""

    def __init__(self, name: str) -> None:
        self.name, self.header = name, PushHeader(version=-1)

    def facts(self) -> dict[str, Any]:
        """As a generation service has them in its heartbeat."""
        return {"version": self.header.version, "digest": self.header.digest}

    async def PushWeights(self, request_iterator: AsyncIterator[WeightFrame], context: Context) -> PushResult:
        """Admit every push, read it, and answer."""
        await context.send_initial_metadata((ADMITTED,))
        async for frame in request_iterator:
            if frame.HasField("header"):
                self.header = frame.header
        return PushResult(version=self.header.version, digest=self.header.digest)

    async def Describe(self, _request: DescribeRequest, _context: Context) -> GeneratorDescription:
        """The version."""
        return GeneratorDescription(name=self.name, version=self.header.version, digest=self.header.digest)


async def serve(run_dir: Path, redis_url: str, number: int) -> None:
    """Serve until the process is ended."""
    config = read_config(run_dir / CONFIG_NAME)
    service = Service(Options(GENERATION, run_dir, redis_url, GENERATION, "127.0.0.1", 0, 0, False, config))
    servers = []  # a server ends with its object
    async with asyncio.TaskGroup() as beats:
        for name in (f"{GENERATION}-{at}" for at in range(number)):
            generator = StandIn(name)
            add = partial(add_GenerationServicer_to_server, generator)
            server = GrpcServer(GrpcApi(SERVICE_NAME, add), host="127.0.0.1", port=0, token="")
            await server.start()
            servers.append(server)
            instance = Instance(GENERATION, name, grpc=server.address, pid=1, uid=name)
            beats.create_task(
                Registration(service.redis, service.keys, instance, Activity(GENERATION), generator.facts).run()
            )


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
