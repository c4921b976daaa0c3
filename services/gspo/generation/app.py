"""The generation service: starts the engine, receives weights, works on prompts until the run ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

from transformers import AutoTokenizer

from gspo.common.config.schema import Config
from gspo.common.host.machine import engine_gpus, torch_is_for_cpus
from gspo.common.model.files import model_folder
from gspo.common.network.grpc_server import GrpcApi
from gspo.common.service.app import App, Service, run_app
from gspo.environments.environment import Environment
from gspo.environments.function_environment import FunctionEnvironment
from gspo.environments.server_environment import environments_on_servers
from gspo.generation.check import check
from gspo.generation.engine.api import EngineLike
from gspo.generation.engine.staging import PolicyCopies
from gspo.generation.loop import GenerationLoop
from gspo.generation.rollout.driver import RolloutDriver
from gspo.generation.rollout.episodes import Episodes
from gspo.generation.servicer import SERVICE_NAME, GenerationGrpcServicer
from gspo.generation.shared_gpus import gpus_of
from gspo_proto import generation_pb2_grpc

StartEngine: TypeAlias = Callable[[Config, Path], Awaitable[EngineLike]]


async def run_generation(service: Service, start_engine: StartEngine) -> None:
    """Generate until the run is finished or the service is stopped.

    Args:
        start_engine: From the configuration and the model's folder: the one of engine/startup.py, or one that
            simulates.
    """
    await run_app(service, lambda service: startup(service, start_engine), ends_with_run=True)


@asynccontextmanager
async def startup(service: Service, start_engine: StartEngine) -> AsyncIterator[App]:
    """Read the weights and start the engine; both end after the block."""
    config, activity = service.config, service.activity
    if service.options.stay:  # there was no check before
        await asyncio.to_thread(check, config)
    folder = model_folder(config.model)
    activity.set("busy", "reading the weights")
    copies = await asyncio.to_thread(
        PolicyCopies.from_folder,
        folder,
        config.generation.dtype,
        trust_remote_code=config.model.trust_remote_code,
        file=service.options.policies,
    )
    async with gpus_of(service):
        # The engine's processes import, load the model and answer a first request before it returns.
        activity.set("busy", "starting vLLM", _details_of_start(config))
        engine = await start_engine(config, folder)
        try:
            gpus = await asyncio.to_thread(engine_gpus, config.generation.engine)
            async with environments_on_servers(config.sources, config.reward) as on_servers:
                yield _app(service, folder, engine, copies, gpus, on_servers)
        finally:
            await engine.stop()
            copies.close()


def _details_of_start(config: Config) -> str:
    if torch_is_for_cpus() or config.generation.engine.get("enforce_eager"):
        return "and loading the model into it"
    return "with compilation and CUDA graphs, a minute or more at its first start"


def _app(
    service: Service,
    folder: Path,
    engine: EngineLike,
    copies: PolicyCopies,
    gpus: Mapping[str, str],
    on_servers: Mapping[str, Environment],
) -> App:
    config = service.config
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
    functions = FunctionEnvironment(service)
    episodes = Episodes(functions, tokenizer, on_servers, config.staleness.max_attempts)
    driver = RolloutDriver(engine, tokenizer, config.generation, episodes)
    loop = GenerationLoop(service, engine, driver)
    servicer = GenerationGrpcServicer(service, engine, copies, driver, loop)
    return App(
        loop.run,
        background={"engine": servicer.wait_until_broken, "environments": functions.run},
        grpc=GrpcApi(
            SERVICE_NAME, lambda server: generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)
        ),
        facts=lambda: {**servicer.facts(), "gpus": gpus, "drafts": engine.drafts._asdict()},
    )
