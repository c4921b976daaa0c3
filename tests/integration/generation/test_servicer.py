"""Calls of the generation service over real gRPC; the engine only takes time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.simulated.engine import SimulatedEngine
from benchmarks.simulated.settings import Settings
from gspo.common.network.grpc_server import GrpcApi, GrpcServer, open_channel
from gspo.environments.function_environment import FunctionEnvironment
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.rollout.driver import RolloutDriver
from gspo.generation.rollout.episodes import Episodes
from gspo.generation.servicer import SERVICE_NAME, GenerationGrpcServicer
from gspo_proto import generation_pb2_grpc
from gspo_proto.generation_pb2 import GenerateRequest
from gspo_proto.rollout_pb2 import GroupTask, Prompt, Sampling
from tests.support.push_peers import IdleLoop, run_config, service_of
from tests.support.service_process import make_run
from tests.support.tiny_model import make_tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(60)]


async def test_a_generate_call_that_its_caller_cancels_leaves_no_request_in_the_engine(
    redis_url: str, tmp_path: Path
) -> None:
    config = run_config(tmp_path, make_run)
    service, copies = service_of("generation-0", config, redis_url), PolicyCopies({"a": (4,)}, "float32")
    settings = Settings(decode_s=10.0, decode_s_per_request=0.0, length_median=100)
    engine = SimulatedEngine(settings, max_num_seqs=4, vocabulary=90, eos=2, key=7)
    tokenizer = make_tokenizer()
    episodes = Episodes(FunctionEnvironment(service), tokenizer)
    driver = RolloutDriver(engine, tokenizer, config.generation, episodes)
    loop: Any = IdleLoop()
    servicer = GenerationGrpcServicer(service, engine, copies, driver, loop)
    server = GrpcServer(
        GrpcApi(SERVICE_NAME, lambda server: generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)),
        host="127.0.0.1",
        port=0,
        token="",
    )
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            task = GroupTask(
                schema=1, num_rollouts=3, prompt=Prompt(token_ids=[1]), sampling=Sampling(temperature=1, max_tokens=8)
            )
            call = stub.Generate(GenerateRequest(task=task), timeout=60)
            while engine.num_running < 3:
                await asyncio.sleep(0.01)
            call.cancel()
            async with asyncio.timeout(10):
                while engine.num_running:
                    await asyncio.sleep(0.01)
            assert await call.code() == grpc.StatusCode.CANCELLED
    finally:
        await server.stop(0.0)
        await engine.stop()
        await service.redis.aclose()
        copies.close()
